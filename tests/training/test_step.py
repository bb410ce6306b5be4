"""One optimizer step: its reads from the device, and the time of its parts."""

import inspect
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import meshtrain
from meshtrain.training import step as step_module
from meshtrain.training.step import StepResult, mark
from meshtrain.verify.parallel import build_step_context
from tests.parallel.steps import start, take_step
from tests.parity import Case
from tests.ranks import run_on_ranks

READS = (Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.cpu, Tensor.numpy)


class HostReads(TorchFunctionMode):
    """Records where in meshtrain the host waits for the value of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.locations: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = inspect.stack(context=0)[1]
        if func in READS and Path(caller.filename).is_relative_to(meshtrain.__path__[0]):
            self.locations.append(f"{Path(caller.filename).name}: {caller.function}")
        return func(*args, **(kwargs or {}))


def reads_of_a_step(case: Case) -> list[str]:
    context = build_step_context(start(case))
    take_step(context, 0)
    with HostReads() as reads:
        take_step(context, 1)
    return reads.locations


@pytest.mark.parametrize("mesh", [(1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 1, 2)], ids=str)
def test_step_reads_from_the_device_once(mesh: tuple[int, int, int, int]) -> None:
    case = Case("qwen3", mesh)
    assert run_on_ranks(case.world_size, reads_of_a_step, case) == [["step.py: train_step"]] * case.world_size


def slow_step() -> tuple[StepResult, float]:
    """Return the result and the duration of a step with slower passes and gradients."""
    context = build_step_context(start(Case("qwen3", (1, 1, 1, 1))))
    take_step(context, 0)
    compute, finish = step_module._compute_gradients, step_module.finish_gradients

    def compute_slowly(*arguments: Any) -> Any:
        time.sleep(0.2)
        return compute(*arguments)

    def finish_slowly(*arguments: Any) -> None:
        time.sleep(0.4)
        finish(*arguments)

    step_module._compute_gradients, step_module.finish_gradients = compute_slowly, finish_slowly
    begin = time.perf_counter()
    return take_step(context, 1), time.perf_counter() - begin


def test_seconds_of_the_parts_of_a_step_add_up() -> None:
    ((result, seconds),) = run_on_ranks(1, slow_step)
    assert result.forward_backward_seconds >= 0.2
    assert result.optimizer_seconds >= 0.4
    assert result.forward_backward_seconds + result.optimizer_seconds == pytest.approx(seconds, abs=0.1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, which works behind the host")
def test_marks_measure_gpu_time() -> None:
    device = torch.device("cuda")
    first = mark(device)
    torch.cuda._sleep(200_000_000)
    second = mark(device)
    queued = second.host_seconds - first.host_seconds
    torch.cuda.synchronize()
    assert queued < 0.05 < first.seconds_until(second)
