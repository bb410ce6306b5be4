"""What a step costs on the host besides its operators."""

import statistics
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshtrain.parallel.check.batch import num_microbatches
from meshtrain.planning.simulation.building import build_context, build_models
from meshtrain.planning.simulation.run import SimulatedRun
from meshtrain.training.optim import build_optimizer
from meshtrain.training.preference.rows import reference_like
from meshtrain.training.step import StepContext, train_step
from meshtrain.training.weight_average import build_average

WARM_UP, STEPS = 3, 15


def build_real(run: SimulatedRun, device: torch.device) -> tuple[StepContext, dict[str, Tensor]]:
    """Build what a run works with, and a batch of random tokens. Collective."""
    pipeline, teacher = build_models(run, device)
    pipeline.initialize(0)
    if teacher is not None:
        teacher.pipeline.initialize(0)
    average = build_average(pipeline, run.ema)
    if average is not None:
        average.begin()
    context = build_context(run, pipeline, teacher, build_optimizer(pipeline, run.optimizer), average)
    rows = num_microbatches(run.plan, run.batch) * run.batch.micro_batch_size
    vocabulary = run.hf_config.get_text_config().vocab_size
    ids = torch.randint(3, vocabulary, (rows, run.batch.sequence_length), generator=torch.Generator().manual_seed(0))
    batch = {name: ids.to(device) for name in ("input_ids", "labels")}
    if "attention_mask" in run.inputs:
        # A mask without pads would be left out.
        batch["attention_mask"] = torch.ones_like(batch["labels"])
        batch["attention_mask"][:, -1] = 0
    return context, batch | reference_like(run.preference, batch["labels"])


def measure_steps(run: SimulatedRun, device: torch.device, number: int, warm_up: int = WARM_UP) -> list[float]:
    """Return the seconds of some steps of a run. Collective; the slowest process counts."""
    context, batch = build_real(run, device)
    ids = np.arange(run.batch.global_batch_size)
    seconds = []
    for step in range(warm_up + number):
        dist.barrier()
        begin = time.perf_counter()
        train_step(context, step, batch, ids)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    slowest = torch.tensor(seconds[warm_up:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def host_overhead(run: SimulatedRun, device: torch.device, known_seconds: float, number: int) -> float:
    """Return the seconds on the host of one thing that a small run does. Collective.

    Args:
        run: with small operators, of which a GPU waits for the host.
        device: that computes.
        known_seconds: what all else takes.
        number: of such things in its step.
    """
    median = statistics.median(measure_steps(run, device, STEPS))
    return max(0.0, median - known_seconds) / number
