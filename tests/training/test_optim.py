"""AdamW on the shards of a mesh, and the learning rate over a run."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import get_scheduler

from meshtrain.checkpoint.dcp.store import write_checkpoint
from meshtrain.checkpoint.storage.publishing import Retention
from meshtrain.config.optimizer import LearningRateConfig, LearningRateScheduleName, OptimizerConfig
from meshtrain.errors import ConfigError
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.training.optim import build_learning_rate, build_optimizer
from meshtrain.training.optimizer_state import state_tensors
from meshtrain.training.state import load_state, saved_tensors
from tests.checkpoint.stages import manifest_of
from tests.parallel.steps import moments, start
from tests.parity import Case
from tests.ranks import run_on_ranks

RATE, DECAY = 1e-2, 0.5
CONFIG = OptimizerConfig(learning_rate=RATE, weight_decay=DECAY, epsilon=1e-4)
# Vectors, embeddings, fused projections: unsharded, sharded over tp, over dp_shard, and over both.
CASES = {
    1: [Case("gpt2-tied", (1, 1, 1, 1)), Case("qwen3", (1, 1, 1, 1))],
    4: [Case("gpt2-tied", (1, 1, 2, 2)), Case("qwen3", (2, 1, 1, 2)), Case("gpt2-odd", (1, 1, 4, 1))],
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 4, "min_lr_ratio": 0.1},
    "polynomial": {"power": 2.0, "lr_end": 1e-5},
    "cosine_with_restarts": {"num_cycles": 2},
    "cosine": {"num_cycles": 0.4},
    "inverse_sqrt": {"timescale": 5},
}


def set_gradients(pipeline: Pipeline, value: float) -> None:
    for _, parameter in pipeline.named_parameters():
        parameter.grad = torch.full_like(parameter, value)


def decayed(case: Case) -> dict[str, tuple[int, float, float]]:
    """Return the dimensions of every parameter, and its change in a step without a gradient."""
    pipeline = start(case)
    with torch.no_grad():
        for _, parameter in pipeline.named_parameters():
            local_tensor(parameter).add_(0.5)
    before = {name: local_tensor(p.detach()).clone() for name, p in pipeline.named_parameters()}
    optimizer = build_optimizer(pipeline, CONFIG)
    set_gradients(pipeline, 0.0)
    optimizer.step()
    result = {}
    for name, parameter in pipeline.named_parameters():
        ratio = local_tensor(parameter.detach()) / before[name]
        result[name] = (parameter.dim(), ratio.min().item(), ratio.max().item())
    return result


def decayed_in_all(cases: list[Case]) -> list[dict[str, tuple[int, float, float]]]:
    return [decayed(case) for case in cases]


@pytest.mark.parametrize("world_size", CASES)
def test_weight_decay_excludes_norms_and_biases(world_size: int) -> None:
    for answers in run_on_ranks(world_size, decayed_in_all, CASES[world_size]):
        for found in answers:
            assert {dims for dims, _, _ in found.values()} == {1, 2}
            for name, (_, smallest, largest) in found.items():
                is_matrix = name.endswith("weight") and not any(part in name for part in ("norm", "ln_"))
                expected = 1 - RATE * DECAY if is_matrix else 1.0
                assert smallest == pytest.approx(expected, rel=1e-12), name
                assert largest == pytest.approx(expected, rel=1e-12), name


def moments_over_two_steps(case: Case, root: Path) -> dict[str, Any]:
    """Take two steps; repeat the second with another optimizer that loads the first's state."""
    pipeline = start(case)
    optimizer = build_optimizer(pipeline, CONFIG)
    parameters = dict(pipeline.named_parameters())
    fresh = not state_tensors(optimizer, parameters)
    set_gradients(pipeline, 0.3)
    optimizer.step()
    laid_out = all(
        (moment.shape, getattr(moment, "placements", ())) == (parameter.shape, getattr(parameter, "placements", ()))
        for parameter in parameters.values()
        for moment in moments(optimizer, parameter).values()
    )
    after_one = _snapshot(pipeline)
    first = moments(optimizer, next(iter(parameters.values())))
    values = [local_tensor(first[kind]).unique().tolist() for kind in ("exp_avg", "exp_avg_sq")]
    write_checkpoint(
        root,
        saved_tensors(pipeline, optimizer),
        manifest=manifest_of(1),
        huggingface=None,
        retention=Retention(newest=1),
    )
    set_gradients(pipeline, -0.7)
    optimizer.step()
    after_two = _snapshot(pipeline)

    other = build_optimizer(pipeline, CONFIG)
    load_state(root / "step-1", pipeline, other)
    loaded = _snapshot(pipeline)
    set_gradients(pipeline, -0.7)
    other.step()
    resumed = _snapshot(pipeline)
    other.zero_grad()
    return {
        "fresh": fresh,
        "laid_out": laid_out,
        "values": values,
        "sharded": any(isinstance(p, DTensor) for p in parameters.values()),
        "loaded": all(torch.equal(after_one[name], loaded[name]) for name in parameters),
        "resumed": all(torch.equal(after_two[name], resumed[name]) for name in parameters),
        "moved": all(not torch.equal(after_one[name], after_two[name]) for name in parameters),
        "forgotten": all(p.grad is None for p in parameters.values()),
    }


def _snapshot(pipeline: Pipeline) -> dict[str, Tensor]:
    return {name: local_tensor(p.detach()).clone() for name, p in pipeline.named_parameters()}


def test_moments_have_the_layout_of_parameters_and_survive_a_restart(tmp_path: Path) -> None:
    (one,) = run_on_ranks(1, moments_over_two_steps, CASES[1][0], tmp_path / "one")
    answers = [one, *run_on_ranks(4, moments_over_two_steps, CASES[4][0], tmp_path / "four")]
    assert [answer["sharded"] for answer in answers] == [False, True, True, True, True]
    for answer in answers:
        assert all(answer[fact] for fact in ("fresh", "laid_out", "loaded", "resumed", "moved", "forgotten")), answer
        (mean,), (square,) = answer["values"]
        assert mean == pytest.approx((1 - CONFIG.beta1) * 0.3)
        assert square == pytest.approx((1 - CONFIG.beta2) * 0.09)


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("name", [name for name in get_args(LearningRateScheduleName) if name != "exponential"])
def test_learning_rates_equal_those_of_transformers(name: str, warmup: int) -> None:
    steps, arguments = 12, ARGUMENTS.get(name, {})
    warmup = 0 if name == "constant" else warmup
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=RATE)
    scheduler = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=arguments)
    config = LearningRateConfig(name=name, warmup_steps=warmup, arguments=arguments)
    learning_rate = build_learning_rate(config, RATE, steps)
    expected = []
    for _ in range(steps):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert [learning_rate(step) for step in range(steps)] == expected
    # A resumed run asks for a step in the middle, with nothing before it.
    assert build_learning_rate(config, RATE, steps)(7) == expected[7]


def problems(name: str, warmup: int = 0, **arguments: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        build_learning_rate(LearningRateConfig(name=name, warmup_steps=warmup, arguments=arguments), RATE, 10)
    return caught.value.lines


@pytest.mark.parametrize(
    ("name", "warmup", "arguments", "reason"),
    [
        ("linear", 0, {"num_cycles": 1}, "got an unexpected keyword argument 'num_cycles'"),
        ("cosine", 0, {"num_cycle": 1}, "got an unexpected keyword argument 'num_cycle'"),
        ("cosine", 0, {"num_cycles": "a"}, "could not convert string to float: 'a'"),
        ("cosine", 5, {"num_cycles": "a"}, "could not convert string to float: 'a'"),
        ("cosine", 0, {"last_epoch": 3}, "param 'initial_lr' is not specified"),
        ("cosine_with_min_lr", 0, {}, "One of min_lr or min_lr_rate should be set"),
        ("warmup_stable_decay", 0, {}, "missing 1 required positional argument: 'num_decay_steps'"),
        ("polynomial", 0, {"lr_end": 1.0}, "lr_end (1.0) must be smaller than initial lr (0.01)"),
        ("polynomial", 9, {"power": "two"}, "unsupported operand type(s) for **"),
    ],
)
def test_wrong_schedule_arguments_are_refused(name: str, warmup: int, arguments: dict[str, Any], reason: str) -> None:
    (problem,) = problems(name, warmup, **arguments)
    assert problem.startswith(f"learning_rate: the schedule {name!r} refuses its arguments: ")
    assert reason in problem


def test_settings_that_a_schedule_ignores_are_refused() -> None:
    assert problems("constant", 5, num_cycles=1) == (
        "learning_rate.warmup_steps: the schedule 'constant' does not use it; leave it out",
        "learning_rate.arguments: the schedule 'constant' does not use it; leave it out",
    )
    assert problems("constant_with_warmup", 5, num_cycles=1) == (
        "learning_rate.arguments: the schedule 'constant_with_warmup' does not use it; leave it out",
    )
    assert problems("exponential", 5, lr_start=1e-7) == (
        "learning_rate.warmup_steps: the schedule 'exponential' does not use it; leave it out",
    )


def test_exponential_rates_have_equal_ratios_between_two_ends() -> None:
    config = LearningRateConfig(name="exponential", arguments={"lr_start": 1e-6})
    rates = [build_learning_rate(config, RATE, 5)(step) for step in range(5)]
    assert rates == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, RATE])
    assert build_learning_rate(config, RATE, 1)(0) == 1e-6


@pytest.mark.parametrize("arguments", [{}, {"lr_start": 0}, {"lr_start": "a"}, {"lr_start": True}, {"lr_begin": 1e-7}])
def test_exponential_rates_need_a_start(arguments: dict[str, Any]) -> None:
    (problem,) = problems("exponential", **arguments)
    assert problem == (
        "learning_rate.arguments: the schedule 'exponential' takes only lr_start, a number above 0, found "
        f"{arguments}; write arguments = {{ lr_start = 1e-7 }}"
    )
