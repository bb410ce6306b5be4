"""Adapters beside a frozen model in four bits (`lora.base = "nf4"`)."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

from meshtrain.compat.weight_readers import weights_read_by
from meshtrain.config.lora import LoraConfig
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.config.plan import ComputeDtype, ParallelPlan, PrecisionPlan, TensorPlan
from meshtrain.config.run import RunConfig
from meshtrain.errors import CheckpointError, ConfigError
from meshtrain.inference.lora import export
from meshtrain.inference.prompts import Decoding, generate_texts
from meshtrain.models.packed import LEVELS, blocks_of, pack, packed_projections, packed_width, unpack
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.packing import check_packing
from meshtrain.parallel.pipeline import full_tensor
from meshtrain.parallel.pretrained import load_pretrained
from meshtrain.runtime.mesh import init_mesh
from meshtrain.training.report import plan_table
from meshtrain.training.resolve import resolve_run
from tests.ranks import run_on_ranks
from tests.training.experts import experts_plan, train_eagerly, write_experts
from tests.training.lora_runs import (
    CONTEXT,
    check_counts,
    compiled_losses,
    logits_of,
    lora_run,
    refusal,
    stock_losses,
    train,
    write_base,
)
from tests.training.runs import GPT2, VOCABULARY, Mesh, read_checkpoint, steps_of

LORA = LoraConfig(rank=4, alpha=8, base="nf4")
WIDE = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}
# tp cuts the inputs of every projection into blocks of 64.
CUT = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
# tp = 2 does not divide the heads.
UNEVEN = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64}
MESHES: list[Mesh] = [(1, 1, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1), (2, 1, 2, 1)]
OVER_TP: list[Mesh] = [(1, 1, 1, 4), (2, 1, 1, 2), (1, 1, 2, 2)]
GREEDY = Decoding(8, temperature=0.0)
FAST = OptimizerConfig(learning_rate=0.05)


def rounded(weight: Tensor) -> Tensor:
    """Return the numbers that four bits keep of a weight."""
    packed = torch.zeros(weight.shape[0], packed_width(weight.shape[1], torch.uint8), dtype=torch.uint8)
    pack(weight, packed)
    return unpack(packed, weight.dtype)


def write_rounded(directory: Path) -> Any:
    """Write a base whose projections are in full the numbers that four bits keep, and return it."""
    model = AutoModelForCausalLM.from_pretrained(directory / "base", dtype=torch.float64)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                module.weight.copy_(rounded(module.weight))
    model.save_pretrained(directory / "rounded")
    return model


def beside(run: RunConfig, base: str) -> RunConfig:
    """Return a run beside the parameters of another base."""
    model = run.model.model_copy(update={"path": str(Path(str(run.model.path)).with_name(base))})
    return run.model_copy(update={"model": model, "lora": run.lora.model_copy(update={"base": "parameters"})})


def test_every_number_becomes_the_nearest_level() -> None:
    weight = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    weight[1] = 0.0
    found, blocks = rounded(weight), weight.view(5, 3, 64)
    largest = blocks.abs().amax(-1, keepdim=True)
    levels = torch.tensor(LEVELS) * largest.unsqueeze(-1)
    nearest = (blocks.unsqueeze(-1) - levels).abs().argmin(-1, keepdim=True)
    assert torch.equal(found, levels.expand(5, 3, 64, 16).gather(-1, nearest).view(5, 192))


def test_numbers_are_packed_as_by_bitsandbytes() -> None:
    # The same on every machine. With a division by the largest one, one of them had another level.
    places = torch.arange(39 * 2**18, 40 * 2**18)
    weight = ((places * 2654435761 % 2**32 - 2**31).double() / 2**31).float().view(256, 1024)
    packed = torch.zeros(256, packed_width(1024, torch.uint8), dtype=torch.uint8)
    pack(weight, packed)
    codes, largest = blocks_of(packed).split([32, 4], dim=2)
    content = codes.contiguous().numpy().tobytes() + largest.contiguous().numpy().tobytes()
    # Of what `quantize_4bit(weight, blocksize=64, quant_type="nf4")` of bitsandbytes 0.50 returns.
    wanted = "b4cddbc04588e90efc24d2438ca9f30f44697c3d8404d7cdbdc166ec7a00f3f2"
    assert sha256(content).hexdigest() == wanted


@pytest.mark.parametrize(("sizes", "meshes"), [(WIDE, MESHES), ({**CUT, "head_dim": 64}, OVER_TP)])
def test_adapters_train_beside_four_bits_as_beside_the_same_numbers(
    tmp_path: Path, sizes: dict[str, int], meshes: list[Mesh]
) -> None:
    write_base(tmp_path, **sizes)
    write_rounded(tmp_path)
    one = lora_run(tmp_path, (1, 1, 1, 1), name="one", lora=LORA, steps=3)
    (wanted,) = run_on_ranks(1, stock_losses, beside(one, "rounded"), joins=False)
    for number, mesh in enumerate(meshes):
        found = train(lora_run(tmp_path, mesh, name=f"run{number}", lora=LORA, steps=3))
        assert found == pytest.approx(wanted, rel=1e-12), mesh
    context = CONTEXT.model_copy(update={"tp": min(2, meshes[0][3])})
    parts = TensorPlan(sequence_parallel=context.tp > 1)
    run = lora_run(tmp_path, (1, 1, 1, 1), name="context", lora=LORA, steps=3)
    found = train(run.model_copy(update={"plan": run.plan.model_copy(update={"mesh": context, "tensor": parts})}))
    assert found == pytest.approx(wanted, rel=1e-12)


def test_heads_that_processes_share_unevenly_are_packed(tmp_path: Path) -> None:
    write_base(tmp_path, **CUT | UNEVEN)
    write_rounded(tmp_path)
    lora = LORA.model_copy(update={"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]})
    one, two = (lora_run(tmp_path, (1, 1, 1, tp), name=f"tp{tp}", lora=lora, steps=3) for tp in (1, 2))
    assert train(two) == pytest.approx(train(beside(one, "rounded")), rel=1e-12)


def losses_of_experts(run: RunConfig) -> list[float]:
    run_on_ranks(run.plan.mesh.world_size, train_eagerly, run, joins=False)
    return [metrics["loss"] for metrics in steps_of(Path(run.run_directory))]


def test_projections_beside_experts_on_other_processes_are_packed(tmp_path: Path) -> None:
    write_experts(tmp_path / "base", hidden_size=64, head_dim=64)
    write_rounded(tmp_path)
    lora = LORA.model_copy(update={"target_modules": ["q_proj", "v_proj", "o_proj"]})
    one = lora_run(tmp_path, (1, 1, 1, 1), name="one", lora=lora, steps=3)
    wanted = losses_of_experts(beside(one, "rounded"))
    for name, plan in (("ep", experts_plan(ep=2)), ("ep x tp", experts_plan(ep=2, tp=2))):
        run = lora_run(tmp_path, (1, 1, 1, 1), name=name, lora=lora, steps=3)
        assert losses_of_experts(run.model_copy(update={"plan": plan})) == pytest.approx(wanted, rel=1e-12), name


def packed_bits(run: RunConfig) -> dict[str, bytes]:
    """Return the bits of the packed weights of a run, gathered, by name."""
    resolved = resolve_run(run)
    pipeline = build_pipeline(
        resolved.model,
        init_mesh(resolved.plan.mesh, "cpu"),
        resolved.plan,
        micro_batch_size=1,
        seed=0,
        device=torch.device("cpu"),
        adapters=resolved.adapters,
        packs_base=True,
    )
    load_pretrained(pipeline, Path(str(run.model.path)))
    names = {name for stage in pipeline.stages for name, _ in packed_projections(stage.model)}
    full = {name: full_tensor(it.detach()) for name, it in pipeline.named_parameters() if name in names}
    return {name: it.contiguous().view(torch.uint8).numpy().tobytes() for name, it in full.items()}


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_processes_of_tp_pack_the_bits_that_one_process_packs(tmp_path: Path, compute: ComputeDtype) -> None:
    write_base(tmp_path, **CUT)
    precision = PrecisionPlan(parameters="float32", compute=compute, reduce="float32")
    found = []
    for mesh in ((1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 3, 2)):
        run = lora_run(tmp_path, mesh, lora=LORA, global_batch_size=24)
        run = run.model_copy(update={"plan": run.plan.model_copy(update={"precision": precision})})
        found += run_on_ranks(run.plan.mesh.world_size, packed_bits, run, joins=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    for bits in found:
        assert len(bits) == 28
        for name, its in bits.items():
            weight = model.get_parameter(name).detach()
            packed = torch.empty(len(weight), packed_width(weight.shape[1], torch.uint8), dtype=torch.uint8)
            pack(weight, packed)
            assert its == packed.numpy().tobytes(), name


def test_run_resumes_and_is_exported(tmp_path: Path) -> None:
    write_base(tmp_path, **CUT)
    base = write_rounded(tmp_path)
    wanted = train(lora_run(tmp_path, (1, 1, 1, 1), name="whole", lora=LORA, steps=4, optimizer=FAST))
    for steps, mesh in enumerate(((1, 1, 1, 2), (1, 1, 1, 1), (2, 1, 2, 1), (1, 2, 1, 2)), start=1):
        found = train(lora_run(tmp_path, mesh, lora=LORA, steps=steps, optimizer=FAST))
    assert found == pytest.approx(wanted, rel=1e-11)
    assert all("lora_" in name for name in read_checkpoint(tmp_path / "run"))
    export(str(tmp_path / "run"), tmp_path / "adapters")
    export(str(tmp_path / "run"), tmp_path / "merged", merge_adapters=True)
    before = logits_of(base)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapters")).double().eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    torch.testing.assert_close(logits_of(adapted), logits_of(merged), rtol=1e-12, atol=1e-12)
    assert (before - logits_of(merged)).abs().max() > 0.01
    texts = [generate_texts(str(tmp_path / it), ["model reads"], GREEDY) for it in ("run", "merged")]
    plan = ParallelPlan(mesh=MeshPlan(tp=2, dp_shard=1))
    texts += run_on_ranks(2, generate_texts, str(tmp_path / "run"), ["model reads"], GREEDY, plan, joins=False)
    assert [*map(list, texts)] == 4 * [texts[1]]
    write_base(tmp_path, seed=1, **CUT)
    changed = refusal(lora_run(tmp_path, (1, 1, 1, 2), lora=LORA, steps=5, optimizer=FAST))
    assert isinstance(changed, CheckpointError)
    assert "its adapters were trained on other weights" in str(changed)


def test_compiled_and_recomputed_layers_compute_the_same(tmp_path: Path) -> None:
    write_base(tmp_path, **CUT)
    wanted, found = (compiled_losses(tmp_path, LORA, (1, 1, 2, 2), is_compiled=it) for it in (False, True))
    assert found == pytest.approx(wanted, rel=1e-12)


def test_half_precision_trains_and_generates(tmp_path: Path) -> None:
    write_base(tmp_path, **CUT)
    precision = PrecisionPlan(parameters="float32", compute="bfloat16", reduce="float32")
    run = lora_run(tmp_path, (1, 1, 2, 2), lora=LORA, steps=4)
    losses = train(run.model_copy(update={"plan": run.plan.model_copy(update={"precision": precision})}))
    assert min(losses) < losses[0]
    # The checksum of the base is that of the same bits, kept as float32 here.
    assert generate_texts(str(tmp_path / "run"), ["model reads"], Decoding(4, temperature=0.0))


def test_four_bits_are_counted(tmp_path: Path) -> None:
    write_base(tmp_path, **WIDE)
    (full,) = resolve_run(lora_run(tmp_path, (1, 1, 1, 1))).shares()
    resolved = resolve_run(lora_run(tmp_path, (1, 1, 1, 1), lora=LORA))
    assert dict(plan_table(resolved).rows)["adapters"].endswith("the rest is frozen, its projections in nf4")
    (packed,) = resolved.shares()
    # Four layers, each with four projections of 64 x 64 and three of 64 x 192, of float64 before.
    numbers = 4 * (4 * 64 * 64 + 3 * 64 * 192)
    # Float64 fills up a block of 64 numbers to five of its own.
    assert full.parameter_bytes - packed.parameter_bytes == 8 * numbers - numbers // 64 * 5 * 8


@pytest.mark.parametrize("sizes", [CUT, CUT | UNEVEN])
def test_counts_are_what_a_process_of_tp_holds(tmp_path: Path, sizes: dict[str, int]) -> None:
    write_base(tmp_path, **sizes)
    lora = LORA.model_copy(update={"target_modules": ["q_proj", "down_proj"]})
    for mesh in ((1, 1, 1, 2), (1, 1, 3, 2)):
        check_counts(lora_run(tmp_path, mesh, lora=lora, global_batch_size=24))


@pytest.mark.parametrize(
    ("changes", "mesh", "message"),
    [
        (
            WIDE,
            (1, 1, 1, 2),
            "lora.base = 'nf4' and plan.mesh.tp = 2: each process would have 96 of the 192 inputs of "
            "model.layers.*.mlp.down_proj, which is no multiple of 64; set a plan.mesh.tp that divides 3, or shard "
            "over plan.mesh.dp_shard",
        ),
        (
            WIDE,
            (1, 1, 15, 1),
            "lora.base = 'nf4': model.layers.*.mlp.down_proj has 64 rows, which are too few for 15 processes; set a "
            "smaller plan.mesh.dp_shard",
        ),
        (
            {**CUT, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
            (1, 1, 5, 2),
            "model.layers.*.self_attn.k_proj has 16 rows on each process of tp, which are too few for 5 processes; set",
        ),
        ({}, (1, 1, 1, 1), "model.layers.0.self_attn.q_proj has 32 inputs, which are no multiple of 64; leave it out"),
    ],
)
def test_what_cannot_be_packed_is_refused(tmp_path: Path, changes: dict[str, int], mesh: Mesh, message: str) -> None:
    write_base(tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        resolve_run(lora_run(tmp_path, mesh, lora=LORA, global_batch_size=240))
    assert message in str(caught.value)


def test_blocks_that_processes_of_tp_would_cut_are_refused(tmp_path: Path) -> None:
    write_base(tmp_path, **CUT | {"num_attention_heads": 6, "num_key_value_heads": 6})
    run = lora_run(tmp_path, (1, 1, 1, 4), lora=LORA.model_copy(update={"target_modules": ["q_proj"]}))
    with pytest.raises(ConfigError) as caught:
        resolve_run(run)
    assert str(caught.value) == (
        "lora.base = 'nf4' and plan.mesh.tp = 4: the processes share the heads of model.layers.*.self_attn.o_proj "
        "unevenly, and a head has 32 inputs, which is no multiple of 64; set a plan.mesh.tp that divides 3, or shard "
        "over plan.mesh.dp_shard"
    )


@pytest.mark.parametrize("style", ["per_head", "local_params"])
def test_styles_that_read_weights_in_full_are_refused(tmp_path: Path, style: str) -> None:
    write_base(tmp_path, **CUT)
    resolved = resolve_run(lora_run(tmp_path, (1, 1, 1, 2), lora=LORA))
    tensor = resolved.plan.tensor
    styles = {name: style if name.endswith("v_proj") else it for name, it in tensor.styles.items()}
    plan = resolved.plan.model_copy(update={"tensor": tensor.model_copy(update={"styles": styles})})
    with pytest.raises(ConfigError) as caught:
        check_packing(resolved.model, LORA, plan)
    assert str(caught.value) == (
        f"lora.base = 'nf4' and plan.mesh.tp = 2: model.layers.*.self_attn.v_proj is '{style}', which packed weights "
        "cannot be; set plan.mesh.tp = 1"
    )


def write_mamba(directory: Path) -> Any:
    """Write a model whose class passes most weights to kernels, and return it."""
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, state_size=4)
    model = MambaForCausalLM(config).double()
    model.save_pretrained(directory / "base")
    return model


def mamba_run(directory: Path, mesh: Mesh, name: str, lora: LoraConfig) -> RunConfig:
    run = lora_run(directory, mesh, name=name, lora=lora, steps=3)
    return run.model_copy(update={"model": run.model.model_copy(update={"attention": "eager"})})


def test_weights_that_a_class_reads_itself_stay_in_full(tmp_path: Path) -> None:
    model = write_mamba(tmp_path)
    lora = LoraConfig(rank=4, alpha=8, base="nf4", target_modules=["in_proj", "x_proj"])
    run, one = (mamba_run(tmp_path, mesh, name, lora) for mesh, name in (((1, 1, 2, 1), "run"), ((1, 1, 1, 1), "full")))
    found = train(run)
    for layer in model.backbone.layers:
        layer.mixer.in_proj.weight.data.copy_(rounded(layer.mixer.in_proj.weight.detach()))
    model.save_pretrained(tmp_path / "rounded")
    assert found == pytest.approx(train(beside(one, "rounded")), rel=1e-12)


class Reader(nn.Module):
    """Has a method with a line in the first column, as some classes of transformers do."""

    def forward(self, states: Tensor) -> Tensor:
        """Read one weight, and the number format of another.

        This line is not indented.
        """
        # Neither is the next comment.
        # It says nothing.
        return states.to(self.other.weight.dtype) @ self.own.weight + self.called(states)


def test_weights_that_a_class_reads_are_found_in_its_source() -> None:
    assert weights_read_by(Reader) == {"own"}


def test_projections_of_another_class_are_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **GPT2)).save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match="the projections of GPT2LMHeadModel are Conv1D, and only Linear is packed"):
        resolve_run(lora_run(tmp_path, (1, 1, 1, 1), lora=LORA))


def test_float8_is_refused(tmp_path: Path) -> None:
    write_base(tmp_path, **WIDE)
    run = lora_run(tmp_path, (1, 1, 1, 1), lora=LORA)
    float8 = PrecisionPlan(parameters="float32", compute="float8", reduce="float32")
    with pytest.raises(ConfigError, match=r"packed weights are unpacked to bfloat16; set plan\.precision\.compute"):
        resolve_run(run.model_copy(update={"plan": run.plan.model_copy(update={"precision": float8})}))
