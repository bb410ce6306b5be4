"""Build what a simulated run works with: over fake tensors, or in memory to measure it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from meshtrain.config.distillation import NO_DISTILLATION
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.planning.simulation.models import build_run_model, run_adapters, shared_structure
from meshtrain.planning.simulation.run import SimulatedRun
from meshtrain.runtime.mesh import init_mesh
from meshtrain.training.distillation.passes import BuiltTeacher
from meshtrain.training.loss_scale import build_loss_scale
from meshtrain.training.run_loss import build_run_loss
from meshtrain.training.step import StepContext, no_update
from meshtrain.training.weight_average import WeightAverage

_REAL: AbstractContextManager[Any] = nullcontext()


def build_models(
    run: SimulatedRun, device: torch.device, allocation: AbstractContextManager[Any] = _REAL
) -> tuple[Pipeline, BuiltTeacher | None]:
    """Return the pipeline of the model, and the teacher, if the run has one. Collective.

    Args:
        run: whose layers they have.
        device: that computes.
        allocation: as for `meshtrain.parallel.build_pipeline`.
    """
    model = build_run_model(run)
    pipeline = build_pipeline(
        model,
        init_mesh(run.plan.mesh, device.type),
        run.plan,
        micro_batch_size=run.batch.micro_batch_size,
        seed=0,
        device=device,
        router=run.router,
        adapters=run_adapters(run, model),
        packs_base=run.lora.base == "nf4",
        allocation=allocation,
        structure=shared_structure(run),
    )
    if run.teacher is None:
        return pipeline, None
    return pipeline, run.teacher.build(pipeline, device, allocation)


def build_context(
    run: SimulatedRun,
    pipeline: Pipeline,
    teacher: BuiltTeacher | None,
    optimizer: Optimizer,
    average: WeightAverage | None,
) -> StepContext:
    """Return what a step of a run works with.

    Args:
        run: of the step.
        pipeline: of the model that trains.
        teacher: if the run has one.
        optimizer: of the pipeline.
        average: of the weights, if the run has one.
    """
    loss = build_run_loss(
        pipeline,
        run.objective,
        run.preference,
        has_weights=run.has_weights,
        distillation=NO_DISTILLATION if run.teacher is None else run.teacher.config,
        teacher=teacher,
    )
    return StepContext(
        pipeline=pipeline,
        loss=loss,
        optimizer=optimizer,
        learning_rate=lambda step: run.optimizer.learning_rate,
        max_gradient_norm=run.optimizer.max_gradient_norm,
        loss_scale=build_loss_scale(run.plan.precision),
        after_update=no_update if average is None else average.update,
    )
