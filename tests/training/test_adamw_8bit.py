"""AdamW with moments in 8 bits: every mesh rounds alike, and continues what another one began."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from meshtrain.config.mesh import MeshPlan
from meshtrain.config.optimizer import MOMENT_BLOCK, GroupConfig, OptimizerConfig, has_8bit_moments
from meshtrain.config.run import ModelConfig, RunConfig
from meshtrain.errors import ConfigError
from meshtrain.models.build import load_hf_config
from meshtrain.parallel.account import account
from meshtrain.training.adamw_8bit import AdamW8bit
from meshtrain.training.dynamic_map import dynamic_map, levels_of
from meshtrain.training.optim import optimizer_over
from meshtrain.training.parameter_groups import parameter_groups
from meshtrain.training.resolve import resolve_run
from meshtrain.verify.case import Trace, with_noise
from meshtrain.verify.parallel import train_pipeline
from meshtrain.verify.reference import build_stock, copy_weights, copy_weights_into, train_model
from tests.casts import lift_float32_casts
from tests.parity import GPT2, LLAMA, Case, assert_equal_to_reference, batches, build, fill
from tests.ranks import run_on_ranks
from tests.training.runs import QWEN3, VOCABULARY, build_plan, build_run, read_checkpoint, steps_of, train_here

# Loaded before casts are lifted.
MODELLING = (modeling_gpt2, modeling_llama, modeling_qwen3)
WIDTH = 2 * MOMENT_BLOCK
WIDE = {
    "llama-untied": ModelConfig(
        type="llama",
        config={**LLAMA, "hidden_size": WIDTH, "intermediate_size": WIDTH, "tie_word_embeddings": False},
    ),
    "gpt2-tied": ModelConfig(type="gpt2", config={**GPT2, "n_embd": WIDTH, "n_inner": WIDTH}),
}
QWEN3_WIDE = ModelConfig(
    type="qwen3",
    config={"vocab_size": VOCABULARY, **QWEN3, "hidden_size": WIDTH, "intermediate_size": WIDTH}
    | {"head_dim": WIDTH // 4},
)
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


def train_stock(model: str, config: OptimizerConfig) -> Trace:
    lift_float32_casts()
    found = stock(model)
    copy_weights_into(found, with_noise(copy_weights(found)))
    groups = []
    for name, parameter in found.named_parameters():
        rate, decay = config.learning_rate, config.weight_decay if parameter.dim() > 1 else 0.0
        if config.groups and ".mlp." in name:
            rate, decay = 5e-4, 0.0
        groups.append({"params": [parameter], "lr": rate, "weight_decay": decay})
    betas = config.beta1, config.beta2
    return train_model(found, batches(), optimizer=Plain8bit(groups, {"betas": betas, "eps": config.epsilon}))


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


def run_of(directory: Path, model: ModelConfig, mesh: MeshPlan, steps: int = 1) -> RunConfig:
    plan = build_plan((1, 1, 1, 1)).model_copy(update={"mesh": mesh})
    run = build_run(directory, "qwen3", plan)
    return run.model_copy(update={"model": model, "optimizer": CONFIG, "steps": steps})


def train(run: RunConfig) -> list[float]:
    """Train on as many ranks as the plan needs, and return the losses."""
    run_on_ranks(run.plan.mesh.fixed_degree, train_here, run, joins=False)
    return [metrics["loss"] for metrics in steps_of(Path(run.run_directory))]


def test_run_resumes_on_other_meshes(tmp_path: Path) -> None:
    wanted = train(run_of(tmp_path / "whole", QWEN3_WIDE, MeshPlan(), steps=4))
    meshes = MeshPlan(dp_shard=2), MeshPlan(dp_shard=1, tp=2), MeshPlan(dp_shard=1, pp=2), MeshPlan()
    for steps, mesh in enumerate(meshes, start=1):
        found = train(run_of(tmp_path / "other", QWEN3_WIDE, mesh, steps=steps))
    assert found == pytest.approx(wanted, rel=1e-12)
    ours, theirs = (read_checkpoint(tmp_path / name) for name in ("other", "whole"))
    assert ours.keys() == theirs.keys()
    codes = [key for key, value in theirs.items() if value.dtype == torch.uint8]
    # Two moments of an embedding, and of seven matrices of each layer.
    assert len(codes) == 2 * (1 + 7 * 4)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=0.0 if key in codes else 1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("signed", "some"),
    [
        # As `create_dynamic_map` of bitsandbytes 0.50 and torchao 0.18 has them.
        (True, {0: -0.9929687976837158, 126: -5.5e-7, 127: 0.0, 128: 5.5e-7, 200: 0.23359374701976776, 255: 1.0}),
        (False, {0: 0.0, 1: 3.25e-7, 2: 7.75e-7, 127: 0.103515625, 254: 0.9964843988418579, 255: 1.0}),
    ],
)
def test_levels_are_those_of_8_bit_adam(signed: bool, some: dict[int, float]) -> None:
    levels = levels_of(signed=signed)
    assert len(levels) == 256 == len({*levels})
    assert levels == sorted(levels)
    assert {index: levels[index] for index in some} == pytest.approx(some, rel=1e-6)


@pytest.mark.parametrize("signed", [True, False])
def test_numbers_become_the_nearest_levels_of_their_block(signed: bool) -> None:
    stream = torch.Generator().manual_seed(0)
    # From very small to very large, and a block of zeros.
    values = torch.randn(6, WIDTH, generator=stream) * 10.0 ** torch.randint(-9, 9, (6, WIDTH), generator=stream)
    values[2, :MOMENT_BLOCK] = 0
    values = values if signed else values.abs()
    codes, scales = torch.zeros(6, WIDTH, dtype=torch.uint8), torch.zeros(6, 2)
    found = dynamic_map(signed=signed, dtype=torch.float32, device=torch.device("cpu"))
    found.pack(values.clone(), codes, scales)
    assert torch.equal(scales, values.unflatten(-1, (2, -1)).abs().amax(-1))
    assert torch.equal(found.unpack(codes, scales), rounded(values, signed=signed).float())
    if not signed:
        assert torch.equal(found.unpack(codes, scales) > 0, values > 0)


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
    # AdamW moves them by 0.003 in all.
    assert parameter.detach().abs().amax() < 0.03


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
    assert isinstance(optimizer, AdamW8bit)
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
    resolved = resolve_run(run_of(tmp_path, QWEN3_WIDE, MeshPlan(dp_shard=1, tp=2)))
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
    model = ModelConfig(type="qwen3", config={**QWEN3_WIDE.config, **changes})
    with pytest.raises(ConfigError) as caught:
        resolve_run(run_of(tmp_path, model, mesh))
    assert caught.value.lines == (message,)


def test_format_of_the_moments_cannot_be_set() -> None:
    with pytest.raises(ValueError, match="`state` is not read by the optimizer 'adamw-8bit'; leave it out"):
        OptimizerConfig.model_validate({"name": "adamw-8bit", "state": "bfloat16"})
