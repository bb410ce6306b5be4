"""Moments in bfloat16: unbiased, the same on every mesh, and off without a trace."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.config.plan import PrecisionPlan
from meshtrain.config.run import RunConfig
from meshtrain.models.positions import global_places
from meshtrain.models.tiles import fill_tiles
from meshtrain.parallel.pipeline import full_tensor
from meshtrain.training.optim import build_optimizer, optimizer_over
from meshtrain.training.parameter_groups import parameter_groups
from meshtrain.training.rounded_adamw import RoundedAdamW, round_at_random
from tests.parallel.steps import moments, start
from tests.parity import Case
from tests.ranks import run_on_ranks

ROUNDED = OptimizerConfig(learning_rate=1e-2, beta2=0.999, state="bfloat16")


def rounded(value: Tensor, key: int = 0) -> Tensor:
    target = torch.empty_like(value, dtype=torch.bfloat16)
    round_at_random([value], [target], global_places(value), torch.tensor(key))
    return target


def test_rounding_keeps_the_mean_and_exact_values() -> None:
    value = torch.full((300, 400), 1 + 2.0**-9)
    found = rounded(value).float()
    # The neighbors are 1 and 1 + 2 ** -7; a quarter is rounded up.
    assert {*found.unique().tolist()} == {1.0, 1 + 2.0**-7}
    assert (found > 1).float().mean().item() == pytest.approx(0.25, abs=0.005)
    for other in (rounded(value, key=1), rounded(value.T.contiguous()).T):
        assert not torch.equal(other.float(), found)
    assert torch.equal(rounded(-value).float(), -found)
    exact = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-130, 1e38]).bfloat16()
    assert torch.equal(rounded(exact.float()), exact)


def test_two_tensors_take_different_bits() -> None:
    value = torch.full((64, 64), 1 + 2.0**-8)
    first, second = (torch.empty_like(value, dtype=torch.bfloat16) for _ in range(2))
    round_at_random([value, value], [first, second], global_places(value), torch.tensor(0))
    assert 0.4 < (first == second).float().mean() < 0.6


def final_moments(state: Any, steps: int = 300) -> tuple[AdamW, Tensor]:
    parameter = torch.nn.Parameter(torch.zeros(64, 16))
    config = ROUNDED.model_copy(update={"state": state})
    named = [("weight", parameter)]
    optimizer = optimizer_over(named, parameter_groups(named, config), config, seed=0)
    stream = torch.Generator().manual_seed(0)
    for _ in range(steps):
        parameter.grad = torch.randn(parameter.shape, generator=stream)
        optimizer.step()
    return optimizer, optimizer.state[parameter]["exp_avg_sq"]


def test_small_changes_add_up() -> None:
    plain, exact = final_moments("parameters")
    optimizer, found = final_moments("bfloat16")
    assert type(plain) is AdamW
    assert isinstance(optimizer, RoundedAdamW)
    assert found.dtype == torch.bfloat16
    # Rounding to the nearest would stop at the first value whose changes are below half a unit.
    assert found.float().mean().item() == pytest.approx(exact.mean().item(), rel=0.005)


def steps_with_known_gradients(case: Case) -> dict[str, dict[str, Tensor]]:
    """Return parameters and moments after steps whose gradients are the same on every mesh."""
    pipeline = start(case)
    optimizer = build_optimizer(pipeline, ROUNDED)
    fqns = pipeline.canonical_names()
    for step in range(3):
        for name, parameter in pipeline.named_parameters():
            parameter.grad = torch.empty_like(parameter)
            key = f"{step} {fqns[name]}"
            fill_tiles(parameter.grad, lambda tile, stream: tile.normal_(generator=stream), key=key)
        optimizer.step()
    return {
        fqns[name]: {
            what: full_tensor(value)
            for what, value in {"parameter": parameter.detach(), **moments(optimizer, parameter)}.items()
        }
        for name, parameter in pipeline.named_parameters()
    }


def test_every_mesh_rounds_alike() -> None:
    meshes = ((1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 2))
    cases = [Case("gpt2-odd", mesh, precision=PrecisionPlan()) for mesh in meshes]
    (whole, *_), *others = (run_on_ranks(case.world_size, steps_with_known_gradients, case) for case in cases)
    assert {value["exp_avg"].dtype for value in whole.values()} == {torch.bfloat16}
    for answers in others:
        for answer in answers:
            assert answer.keys() <= whole.keys()
            for name, values in answer.items():
                assert [what for what, value in values.items() if not torch.equal(value, whole[name][what])] == []
        assert {name for answer in answers for name in answer} == whole.keys()


def test_moments_in_bfloat16_need_parameters_in_float32() -> None:
    values: dict[str, Any] = {
        "run_directory": "out",
        "steps": 1,
        "global_batch_size": 1,
        "model": {"type": "gpt2"},
        "data": {"sequence_length": 8, "train": ["text.jsonl"]},
        "optimizer": {"state": "bfloat16"},
        "plan": {"precision": {"parameters": "bfloat16", "compute": "bfloat16"}},
    }
    with pytest.raises(ValueError, match=r"`optimizer\.state` = 'bfloat16' is for parameters in float32, found"):
        RunConfig.model_validate(values)
