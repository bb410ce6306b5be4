"""Steps of meshtrain on one device, and what they give: losses, norms, seconds, memory."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshtrain.config.run import RunConfig
from meshtrain.planning.calibration.overhead import build_real
from meshtrain.planning.needs import simulated_run
from meshtrain.runtime.process import process_group
from meshtrain.training.resolve import ResolvedRun, resolve_run
from meshtrain.training.step import StepContext, train_step

ACCUMULATED = 2
"""Number of microbatches of a step."""


@dataclass(frozen=True)
class Trained:
    """Some steps.

    Attributes:
        losses: of each step, in nats.
        norms: of the gradients of each step.
        seconds: of each step, with the wait for the device.
        tokens: of a step.
        peak_bytes: the most memory of tensors at once; 0 on a CPU.
        reserved_bytes: the most memory that torch took from the GPU; 0 on a CPU.
        loss_scale: after the last step.
        context: what the steps worked with.
    """

    losses: list[float]
    norms: list[float]
    seconds: list[float]
    tokens: int
    peak_bytes: int
    reserved_bytes: int
    loss_scale: float
    context: StepContext


def resolved(model: dict[str, Any], plan: dict[str, Any], rows: int, length: int) -> ResolvedRun:
    """Return a run of one process with `ACCUMULATED` microbatches a step.

    Args:
        rows: sequences of a microbatch.
        length: tokens of a sequence.
    """
    config = RunConfig.model_validate(
        {
            "run_directory": "gpu",
            "steps": 10,
            "global_batch_size": ACCUMULATED * rows,
            "micro_batch_size": rows,
            "model": model,
            "data": {"sequence_length": length, "tokenizer": {"vocab_size": 300}},
            "optimizer": {"learning_rate": 1e-3},
            "plan": plan,
        }
    )
    return resolve_run(config, 1)


@contextmanager
def computing_on(device: torch.device) -> Iterator[torch.device]:
    """Join a process group of one process on a device.

    The process must see a GPU if, and only if, it computes there.
    """
    try:
        with process_group() as found:
            assert found.type == device.type, f"asked for {device}, found {found}"
            yield found
    finally:
        # After an error, for the next case.
        if dist.is_initialized():
            dist.destroy_process_group()


def train(run: ResolvedRun, device: torch.device, number: int = 3) -> Trained:
    """Train some steps on one batch of random tokens, with the weights that seed 0 gives."""
    context, batch = build_real(simulated_run(run, on_gpus=device.type == "cuda"), device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    ids = np.arange(run.batch.global_batch_size)
    results, seconds = [], []
    for step in range(number):
        seconds.append(seconds_of_step(lambda: results.append(train_step(context, step, batch, ids)), device))  # noqa: B023
    peak, reserved = memory_of(device)
    return Trained(
        losses=[result.loss for result in results],
        norms=[result.gradient_norm for result in results],
        seconds=seconds,
        tokens=batch["input_ids"].numel(),
        peak_bytes=peak,
        reserved_bytes=reserved,
        loss_scale=context.loss_scale.value,
        context=context,
    )


def seconds_of_step(step: Any, device: torch.device) -> float:
    """Return the seconds of a step, until the device has finished it."""
    _wait_for(device)
    begin = time.perf_counter()
    step()
    _wait_for(device)
    return time.perf_counter() - begin


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_of(device: torch.device) -> tuple[int, int]:
    """Return the peaks of allocated and of reserved bytes; 0 on a CPU."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
