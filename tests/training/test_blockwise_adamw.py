"""AdamW with moments in 8 bits: every mesh rounds alike, and continues what another one began."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3 import modeling_qwen3

from meshtrain.config.lora import LoraConfig
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.optimizer import MOMENT_BLOCK, GroupConfig, OptimizerConfig, has_8bit_moments
from meshtrain.config.run import ModelConfig, RunConfig
from meshtrain.errors import ConfigError
from meshtrain.models.build import load_hf_config
from meshtrain.parallel.account import account
from meshtrain.training import blockwise_adamw
from meshtrain.training.blockwise_adamw import BlockwiseAdamW
from meshtrain.training.dynamic_map import levels_of
from meshtrain.training.optim import optimizer_over
from meshtrain.training.parameter_groups import parameter_groups
from meshtrain.training.resolve import resolve_run
from meshtrain.verify.case import ProofCase, Trace, with_noise
from meshtrain.verify.parallel import train_pipeline
from meshtrain.verify.reference import build_stock, copy_weights, copy_weights_into, train_model
from tests.casts import lift_float32_casts
from tests.parallel.test_context import case_of
from tests.parity import GPT2, LLAMA, Case, assert_equal_to_reference, batches, build, fill
from tests.ranks import run_on_ranks
from tests.training.lora_runs import train, write_base
from tests.training.runs import QWEN3, VOCABULARY, build_plan, build_run, read_checkpoint
from tests.training.test_optimizers import train_experts

# Loaded before casts are lifted.
MODELLING = (modeling_gpt2, modeling_llama, modeling_mixtral, modeling_qwen3)
WIDTH = 2 * MOMENT_BLOCK
ALONE = MeshPlan(dp_shard=1)
SIZES = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "head_dim": WIDTH // 4}
WIDE = {
    "llama-untied": ModelConfig(type="llama", config={**LLAMA, **SIZES, "tie_word_embeddings": False}),
    "gpt2-tied": ModelConfig(type="gpt2", config={**GPT2, "n_embd": WIDTH, "n_inner": WIDTH}),
}
QWEN3_WIDE = {"vocab_size": VOCABULARY, **QWEN3, **SIZES}
# Two moments of an embedding, and of seven matrices of each layer, or of their adapters.
NUMBERS_OF_CODES = {"qwen3": 2 * (1 + 4 * 7), "adapters": 2 * 4 * 7 * 2}
GROUP = GroupConfig(parameters=["model.layers.*.mlp"], learning_rate=5e-4, weight_decay=0.0)
CONFIG = OptimizerConfig(name="adamw-8bit", learning_rate=1e-3, epsilon=1e-4, max_gradient_norm=0.5)
CASES = {
    1: [Case("llama-untied", (1, 1, 1, 1))],
    2: [
        Case("llama-untied", (1, 1, 2, 1)),
        Case("llama-untied", (1, 1, 1, 2)),
        Case("llama-untied", (2, 1, 1, 1)),
        Case("llama-untied", (1, 1, 2, 1), offload="cpu"),
        Case("gpt2-tied", (1, 1, 1, 2)),
    ],
    4: [Case("llama-untied", (2, 1, 1, 2)), Case("gpt2-tied", (1, 1, 2, 2))],
}


def rounded(values: Tensor, *, signed: bool) -> Tensor:
    """Return the nearest levels of the blocks of 64 numbers."""
    levels = torch.tensor(levels_of(signed=signed), dtype=values.dtype)
    borders = (levels[1:] + levels[:-1]) / 2
    blocks = values.unflatten(-1, (-1, MOMENT_BLOCK))
    scales = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-300)
    numbers = blocks / scales
    nearest = torch.searchsorted(borders, numbers)
    if not signed:
        nearest = nearest.clamp(min=1).where(numbers > 0, 0)
    return (levels[nearest] * scales).flatten(-2)


class Plain8bit(Optimizer):
    """The formulas of AdamW, whose moments are rounded after each step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (first, second), rate = group["betas"], group["lr"]
            for x in group["params"]:
                state = self.state[x]
                step = state["step"] = state.get("step", 0) + 1
                m = first * state.get("m", torch.zeros_like(x)) + (1 - first) * x.grad
                v = second * state.get("v", torch.zeros_like(x)) + (1 - second) * x.grad**2
                x.mul_(1 - rate * group["weight_decay"])
                x -= rate * m / (1 - first**step) / ((v / (1 - second**step)).sqrt() + group["eps"])
                is_packed = has_8bit_moments(x.shape)
                state["m"] = rounded(m, signed=True) if is_packed else m
                state["v"] = rounded(v, signed=False) if is_packed else v


def stock(model: str) -> Any:
    return build_stock(load_hf_config(WIDE[model]))


def plain_8bit(model: nn.Module, config: OptimizerConfig) -> Plain8bit:
    groups = []
    for name, parameter in model.named_parameters():
        rate, decay = config.learning_rate, config.weight_decay if parameter.dim() > 1 else 0.0
        if config.groups and ".mlp." in name:
            rate, decay = 5e-4, 0.0
        groups.append({"params": [parameter], "lr": rate, "weight_decay": decay})
    return Plain8bit(groups, {"betas": (config.beta1, config.beta2), "eps": config.epsilon})


def train_stock(model: str, config: OptimizerConfig) -> Trace:
    lift_float32_casts()
    found = stock(model)
    copy_weights_into(found, with_noise(copy_weights(found)))
    return train_model(found, batches(), optimizer=plain_8bit(found, config))


def train_all(cases: list[Case], configs: list[OptimizerConfig]) -> list[Trace]:
    lift_float32_casts()
    found = []
    for case, config in zip(cases, configs, strict=True):
        pipeline = build(case, model=WIDE[case.model])
        fill(pipeline, with_noise(copy_weights(stock(case.model))))
        found.append(train_pipeline(pipeline, batches(), config))
    return found


def config_of(model: str) -> OptimizerConfig:
    return CONFIG.model_copy(update={"groups": [GROUP]}) if model == "llama-untied" else CONFIG


def test_every_mesh_computes_what_one_process_does() -> None:
    wanted = {model: run_on_ranks(1, train_stock, model, config_of(model))[0] for model in WIDE}
    for world_size, cases in CASES.items():
        answers = run_on_ranks(world_size, train_all, cases, [config_of(case.model) for case in cases])
        for number, case in enumerate(cases):
            assert_equal_to_reference([traces[number] for traces in answers], wanted[case.model])


def wide_experts(mesh: dict[str, int]) -> ProofCase:
    case = case_of("mixtral", mesh)
    case.hf_config.update(SIZES)
    return case


def train_stock_experts(case: ProofCase) -> tuple[dict[str, Tensor], Trace]:
    lift_float32_casts()
    model = build_stock(case.hf_config, attention=case.attention)
    weights = with_noise(copy_weights(model))
    copy_weights_into(model, weights)
    return weights, train_model(model, case.batches(), optimizer=plain_8bit(model, CONFIG))


def test_stacks_of_experts_have_the_same_blocks_on_every_mesh() -> None:
    cases = [wide_experts(mesh) for mesh in ({"ep": 2}, {"tp": 2}, {"dp_shard": 2})]
    wanted = [run_on_ranks(1, train_stock_experts, case)[0] for case in cases]
    answers = run_on_ranks(2, train_experts, cases, [weights for weights, _ in wanted], CONFIG)
    for number, (_, trace) in enumerate(wanted):
        assert_equal_to_reference([traces[number] for traces in answers], trace)


def run_of(directory: Path, kind: str, mesh: MeshPlan, steps: int = 1, **sizes: int) -> RunConfig:
    """Return a run of a wide Qwen3, or of adapters beside a base in the directory above."""
    run = build_run(directory, "qwen3", build_plan((1, 1, 1, 1)).model_copy(update={"mesh": mesh}))
    if kind == "adapters":
        base = ModelConfig(path=str(directory.parent / "base"), weights="pretrained")
        run = run.model_copy(update={"model": base, "lora": LoraConfig(rank=64, alpha=128)})
    else:
        run = run.model_copy(update={"model": ModelConfig(type="qwen3", config={**QWEN3_WIDE, **sizes})})
    return run.model_copy(update={"optimizer": CONFIG, "steps": steps})


@pytest.mark.parametrize("kind", ["qwen3", "adapters"])
def test_run_resumes_on_other_meshes(kind: str, tmp_path: Path) -> None:
    write_base(tmp_path, **SIZES)
    wanted = train(run_of(tmp_path / "whole", kind, ALONE, steps=4))
    meshes = MeshPlan(dp_shard=2), MeshPlan(dp_shard=1, tp=2), MeshPlan(dp_shard=1, pp=2), ALONE
    for steps, mesh in enumerate(meshes, start=1):
        found = train(run_of(tmp_path / "other", kind, mesh, steps=steps))
    assert found == pytest.approx(wanted, rel=1e-12)
    ours, theirs = (read_checkpoint(tmp_path / name) for name in ("other", "whole"))
    assert ours.keys() == theirs.keys()
    codes = [key for key, value in theirs.items() if value.dtype == torch.uint8]
    assert len(codes) == NUMBERS_OF_CODES[kind]
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=0.0 if key in codes else 1e-12, atol=1e-15)


def over(parameter: nn.Parameter, config: OptimizerConfig = CONFIG) -> Optimizer:
    named = [("layers.0.weight", parameter)]
    return optimizer_over(named, parameter_groups(named, config), config, seed=0)


def test_rarely_used_numbers_move_no_further_than_others() -> None:
    """A mean of squares that became zero would leave epsilon to divide by."""
    parameter = nn.Parameter(torch.zeros(64, MOMENT_BLOCK))
    optimizer = over(parameter, OptimizerConfig(name="adamw-8bit", learning_rate=1e-3, weight_decay=0.0))
    parameter.grad = torch.ones_like(parameter)
    parameter.grad[:, 1:] = 1e-4
    optimizer.step()
    parameter.grad[:, 1:] = 0
    for _ in range(20):
        optimizer.step()
    # AdamW moves them by 0.006 in all, and AdamW8bit of torchao 0.18 by 39.
    assert parameter.detach()[:, 1:].abs().amax() < 0.006


def test_parameters_in_bfloat16_step_in_float32() -> None:
    stream = torch.Generator().manual_seed(0)
    first = torch.randn(128, WIDTH, generator=stream).bfloat16()
    low, high = nn.Parameter(first.clone()), nn.Parameter(first.float())
    optimizers = [over(low), over(high)]
    for _ in range(2):
        low.grad = torch.randn(first.shape, generator=stream).bfloat16()
        high.grad = low.grad.float()
        high.data.copy_(low.data)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(low.detach(), high.detach().bfloat16())


@pytest.mark.parametrize(
    ("shape", "dtype", "bytes_kept"),
    [
        ((64, 64), torch.float32, 2 * (4096 + 64 * 4)),
        ((64, 128), torch.float64, 2 * (8192 + 128 * 8)),
        ((64, 64), torch.bfloat16, 2 * (4096 + 64 * 4)),
        ((2, 64, 64), torch.float32, 2 * (8192 + 128 * 4)),
        # In full: few numbers, rows that end within a block, and vectors.
        ((63, 64), torch.float32, 2 * 63 * 64 * 4),
        ((64, 96), torch.float32, 2 * 64 * 96 * 4),
        ((4096,), torch.bfloat16, 2 * 4096 * 2),
    ],
)
def test_bytes_of_state_are_those_that_are_kept(shape: tuple[int, ...], dtype: torch.dtype, bytes_kept: int) -> None:
    parameter = nn.Parameter(torch.ones(shape, dtype=dtype))
    optimizer = over(parameter)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert isinstance(optimizer, BlockwiseAdamW)
    kept = [it for it in optimizer.state[parameter].values() if it.dim() > 0]
    known = CONFIG.state_bytes(dtype.itemsize, shape, shape, of_matrix=True)
    assert sum(it.nbytes for it in kept) == known == bytes_kept


def test_losses_are_close_to_those_of_adamw() -> None:
    """An autoencoder, which learns within 100 steps."""
    losses = {}
    for name in ("adamw", "adamw-8bit"):
        stream = torch.Generator().manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.05, generator=stream)
        named, config = [*model.named_parameters()], OptimizerConfig(name=name, learning_rate=3e-3)
        optimizer = optimizer_over(named, parameter_groups(named, config), config, seed=0)
        mixing = torch.randn(16, WIDTH, generator=stream)
        found = []
        for _ in range(100):
            inputs = torch.randn(256, 16, generator=stream) @ mixing
            loss = (model(inputs) - inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        assert found[-1] < 0.2 * found[0]
        losses[name] = found
    assert isinstance(optimizer, AdamW)
    assert losses["adamw-8bit"] == pytest.approx(losses["adamw"], rel=0.01)
    assert losses["adamw-8bit"] != losses["adamw"]


def test_check_counts_what_the_meshes_keep(tmp_path: Path) -> None:
    resolved = resolve_run(run_of(tmp_path / "run", "qwen3", MeshPlan(dp_shard=1, tp=2)))
    (stage,) = account(resolved.model, resolved.plan, resolved.config.kept_bytes)
    vectors = 4 * (2 * WIDTH + 2 * WIDTH // 4) + WIDTH
    of_matrices = (VOCABULARY * WIDTH + 7 * 4 * WIDTH**2) // 2
    assert stage.optimizer_bytes == 2 * (8 * vectors + of_matrices + of_matrices // MOMENT_BLOCK * 8)


@pytest.mark.parametrize(
    ("changes", "mesh", "message"),
    [
        (
            {},
            MeshPlan(dp_shard=1, tp=4),
            "optimizer.name = 'adamw-8bit': model.layers.0.self_attn.o_proj.weight has rows of 128 numbers, of which a "
            "process would hold 32, which are no multiple of the 64 that share a scale; set a smaller plan.mesh.tp or "
            "dp_shard, or another optimizer",
        ),
        (
            {"hidden_size": 96, "intermediate_size": 96, "head_dim": 24},
            MeshPlan(dp_shard=1),
            "optimizer.name = 'adamw-8bit': no parameter that trains has rows of a multiple of 64 numbers, and 4,096 "
            'numbers in all, so none would have moments in 8 bits; set optimizer.name = "adamw"',
        ),
    ],
)
def test_plans_that_cut_a_block_are_refused(
    changes: dict[str, int], mesh: MeshPlan, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_run(run_of(tmp_path / "run", "qwen3", mesh, **changes))
    assert caught.value.lines == (message,)


def test_format_of_the_moments_cannot_be_set() -> None:
    with pytest.raises(ValueError, match="`state` is not read by the optimizer 'adamw-8bit'; leave it out"):
        OptimizerConfig.model_validate({"name": "adamw-8bit", "state": "bfloat16"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_parameter_are_updated_as_the_whole(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(50, WIDTH, dtype=dtype), torch.randn(3, 50, WIDTH, dtype=dtype)

    def update() -> list[Tensor]:
        parameter = nn.Parameter(start.clone())
        optimizer = BlockwiseAdamW([{"params": [parameter]}], {parameter: parameter.shape}, lr=1e-2)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        return [parameter.detach(), *optimizer.state[parameter].values()]

    whole = update()
    monkeypatch.setattr(blockwise_adamw, "CHUNK", 2 * WIDTH)
    assert len(list(blockwise_adamw._parts(50, WIDTH))) == 13
    for found, wanted in zip(update(), whole, strict=True):
        assert torch.equal(found, wanted)
