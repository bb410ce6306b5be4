"""Adapters beside a frozen model in four bits (`lora.base = "nf4"`)."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

from meshtrain.config.lora import LoraConfig
from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.config.plan import PrecisionPlan
from meshtrain.config.run import RunConfig
from meshtrain.errors import CheckpointError, ConfigError
from meshtrain.inference.lora import export
from meshtrain.inference.prompts import Decoding, generate_texts
from meshtrain.models.packed import LEVELS, pack, row_bytes, unpack
from meshtrain.models.weight_readers import weights_read_by
from meshtrain.training.report import plan_table
from meshtrain.training.resolve import resolve_run
from tests.ranks import run_on_ranks
from tests.training.lora_runs import (
    CONTEXT,
    compiled_losses,
    logits_of,
    lora_run,
    refusal,
    stock_losses,
    train,
    write_base,
)
from tests.training.runs import GPT2, VOCABULARY, Mesh, read_checkpoint

LORA = LoraConfig(rank=4, alpha=8, base="nf4")
WIDE = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}
MESHES: list[Mesh] = [(1, 1, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1), (2, 1, 2, 1)]
FAST = OptimizerConfig(learning_rate=0.05)


def rounded(weight: Tensor) -> Tensor:
    """Return the numbers that four bits keep of a weight."""
    packed = torch.zeros(weight.shape[0], row_bytes(weight.shape[1]), dtype=torch.uint8)
    pack(weight, packed)
    return unpack(packed, weight.shape[1], weight.dtype)


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
    packed = torch.zeros(256, row_bytes(1024), dtype=torch.uint8)
    pack(weight, packed)
    codes, largest = packed.split([512, 64], dim=1)
    content = codes.contiguous().numpy().tobytes() + largest.contiguous().numpy().tobytes()
    # Of what `quantize_4bit(weight, blocksize=64, quant_type="nf4")` of bitsandbytes 0.50 returns.
    wanted = "b4cddbc04588e90efc24d2438ca9f30f44697c3d8404d7cdbdc166ec7a00f3f2"
    assert sha256(content).hexdigest() == wanted


def test_adapters_train_beside_four_bits_as_beside_the_same_numbers(tmp_path: Path) -> None:
    write_base(tmp_path, **WIDE)
    write_rounded(tmp_path)
    one = lora_run(tmp_path, (1, 1, 1, 1), name="one", lora=LORA, steps=3)
    (wanted,) = run_on_ranks(1, stock_losses, beside(one, "rounded"), joins=False)
    for number, mesh in enumerate(MESHES):
        found = train(lora_run(tmp_path, mesh, name=f"run{number}", lora=LORA, steps=3))
        assert found == pytest.approx(wanted, rel=1e-12), mesh
    run = lora_run(tmp_path, (1, 1, 1, 1), name="context", lora=LORA, steps=3)
    found = train(run.model_copy(update={"plan": run.plan.model_copy(update={"mesh": CONTEXT})}))
    assert found == pytest.approx(wanted, rel=1e-12)


def test_run_resumes_and_is_exported(tmp_path: Path) -> None:
    write_base(tmp_path, **WIDE)
    base = write_rounded(tmp_path)
    wanted = train(lora_run(tmp_path, (1, 1, 1, 1), name="whole", lora=LORA, steps=4, optimizer=FAST))
    for steps, mesh in zip((1, 2, 4), (MESHES[1], MESHES[3], MESHES[0]), strict=True):
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
    texts = [
        generate_texts(str(tmp_path / it), ["model reads"], Decoding(8, temperature=0.0)) for it in ("run", "merged")
    ]
    assert texts[0] == texts[1]
    write_base(tmp_path, seed=1, **WIDE)
    changed = refusal(lora_run(tmp_path, (1, 1, 2, 1), lora=LORA, steps=5, optimizer=FAST))
    assert isinstance(changed, CheckpointError)
    assert "its adapters were trained on other weights" in str(changed)


def test_compiled_and_recomputed_layers_compute_the_same(tmp_path: Path) -> None:
    write_base(tmp_path, **WIDE)
    wanted, found = (compiled_losses(tmp_path, LORA, (1, 1, 2, 1), is_compiled=it) for it in (False, True))
    assert found == pytest.approx(wanted, rel=1e-12)


def test_half_precision_trains_and_generates(tmp_path: Path) -> None:
    write_base(tmp_path, **WIDE)
    precision = PrecisionPlan(parameters="float32", compute="bfloat16", reduce="float32")
    run = lora_run(tmp_path, (1, 1, 2, 1), lora=LORA, steps=4)
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
    numbers = 4 * (4 * 64 * 64 + 2 * 64 * 192)
    rows = 4 * (4 * 64 * row_bytes(64) + 2 * 192 * row_bytes(64) + 64 * row_bytes(192))
    assert full.parameter_bytes - packed.parameter_bytes == 8 * (numbers + 4 * 64 * 192) - rows


@pytest.mark.parametrize(
    ("changes", "mesh", "message"),
    [
        (WIDE, (1, 1, 1, 2), "plan.mesh.tp = 2: packed weights are not cut; set plan.mesh.tp = 1, and shard over"),
        (
            WIDE,
            (1, 1, 112, 1),
            "lora.base = 'nf4': model.layers.0.mlp.down_proj has 64 rows, which are too few for 112 processes; set a "
            "smaller plan.mesh.dp_shard",
        ),
        ({}, (1, 1, 1, 1), "model.layers.0.self_attn.q_proj has 32 inputs, which are no multiple of 64; leave it out"),
    ],
)
def test_what_cannot_be_packed_is_refused(tmp_path: Path, changes: dict[str, int], mesh: Mesh, message: str) -> None:
    write_base(tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        resolve_run(lora_run(tmp_path, mesh, lora=LORA, global_batch_size=224))
    assert message in str(caught.value)


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
