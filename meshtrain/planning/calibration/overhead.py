"""What a step costs on the host besides its operators."""

import statistics
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshtrain.models.build import build_meta_model
from meshtrain.models.dtypes import DTYPES
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check.batch import num_microbatches
from meshtrain.planning.simulation.models import run_adapters
from meshtrain.planning.simulation.rank import simulated_loss
from meshtrain.planning.simulation.run import SimulatedRun
from meshtrain.runtime.mesh import init_mesh
from meshtrain.training.loss_scale import build_loss_scale
from meshtrain.training.optim import build_optimizer
from meshtrain.training.parameter_groups import freeze
from meshtrain.training.preference.rows import reference_like
from meshtrain.training.step import StepContext, no_update, train_step
from meshtrain.training.weight_average import build_average

WARM_UP, STEPS = 3, 15


def build_real(run: SimulatedRun, device: torch.device) -> tuple[StepContext, dict[str, Tensor]]:
    """Build what a run works with, and a batch of random tokens. Collective."""
    plan = run.plan
    model = build_meta_model(
        run.hf_config,
        dtype=DTYPES[plan.precision.parameters],
        attention=run.attention,
        trust_remote_code=run.trust_remote_code,
    )
    adapters = run_adapters(run, model)
    freeze(model, run.optimizer)
    pipeline = build_pipeline(
        model,
        init_mesh(plan.mesh, device.type),
        plan,
        micro_batch_size=run.batch.micro_batch_size,
        seed=0,
        device=device,
        router=run.router,
        adapters=adapters,
        packs_base=run.lora.base == "nf4",
    )
    pipeline.initialize(0)
    average = build_average(pipeline, run.ema)
    if average is not None:
        average.begin()
    teacher = None
    if run.teacher is not None:
        teacher = run.teacher.build(pipeline, device)
        teacher.pipeline.initialize(0)
    rows = num_microbatches(plan, run.batch) * run.batch.micro_batch_size
    vocabulary = run.hf_config.get_text_config().vocab_size
    ids = torch.randint(3, vocabulary, (rows, run.batch.sequence_length), generator=torch.Generator().manual_seed(0))
    context = StepContext(
        pipeline=pipeline,
        loss=simulated_loss(run, pipeline, teacher),
        optimizer=build_optimizer(pipeline, run.optimizer),
        learning_rate=lambda step: run.optimizer.learning_rate,
        max_gradient_norm=run.optimizer.max_gradient_norm,
        loss_scale=build_loss_scale(plan.precision),
        after_update=no_update if average is None else average.update,
    )
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


def operator_overhead(run: SimulatedRun, device: torch.device, known_seconds: float, num_operators: int) -> float:
    """Return the seconds on the host for each operator of a small run. Collective.

    Args:
        run: with operators so small that the host determines how long they take.
        device: that computes.
        known_seconds: of its operators and messages.
        num_operators: of its step.
    """
    median = statistics.median(measure_steps(run, device, STEPS))
    return max(0.0, median - known_seconds) / num_operators
