"""Steps of meshtrain on one device, and what they give: losses, norms, seconds, memory."""

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshtrain.config.run import RunConfig
from meshtrain.models import init_rules
from meshtrain.models.layout import local_tensor
from meshtrain.planning.calibration.overhead import build_real
from meshtrain.planning.needs import simulated_run
from meshtrain.runtime.process import process_group
from meshtrain.training.resolve import ResolvedRun, resolve_run
from meshtrain.training.step import StepContext, train_step
from tests.benchmarks.documents import MEAN_TOKENS, packed_positions

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


def resolved(
    model: dict[str, Any], plan: dict[str, Any], rows: int, length: int, *, documents: str = "joined"
) -> ResolvedRun:
    """Return a run of one process with `ACCUMULATED` microbatches a step.

    Args:
        rows: sequences of a microbatch.
        length: tokens of a sequence.
        documents: "joined", or "separate" for documents that do not see each other.
    """
    config = RunConfig.model_validate(
        {
            "run_directory": "gpu",
            "steps": 10,
            "global_batch_size": ACCUMULATED * rows,
            "micro_batch_size": rows,
            "model": model,
            "data": {"sequence_length": length, "documents": documents, "tokenizer": {"vocab_size": 300}},
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


@contextmanager
def weights_drawn_on_device() -> Iterator[None]:
    """Draw initial weights on the device while the block runs.

    Weights that are the same on every mesh are drawn on the CPU, some five million a second. For
    eight billion, that takes longer than all parts.
    """

    def draw_at_once(tensor: Tensor, draw: Callable[..., object], *, key: str) -> None:
        local = local_tensor(tensor)
        draw(local, torch.Generator(local.device).manual_seed(zlib.crc32(key.encode())))

    draw_tiles = init_rules.fill_tiles
    init_rules.fill_tiles = draw_at_once
    try:
        yield
    finally:
        init_rules.fill_tiles = draw_tiles


def train(run: ResolvedRun, device: torch.device, number: int = 3) -> Trained:
    """Train some steps on one batch of random tokens, with the weights that seed 0 gives."""
    context, batch = build_real(simulated_run(run, on_gpus=device.type == "cuda"), device)
    if run.config.data.documents == "separate":
        rows, length = batch["input_ids"].shape
        batch["position_ids"] = (
            packed_positions(length, min(MEAN_TOKENS, length // 4)).expand(rows, length).contiguous().to(device)
        )
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
