"""Training of the plan on ranks, with the training step of a run."""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from meshtrain.compat.casts import float32_casts_lifted
from meshtrain.compat.distributed import REDISTRIBUTION_LOG
from meshtrain.config.mesh import CP, DATA_AXES, TP, MeshPlan
from meshtrain.config.objective import STOCK_OBJECTIVE, ObjectiveConfig
from meshtrain.config.optimizer import LearningRateConfig, OptimizerConfig
from meshtrain.config.plan import ParallelPlan, PipelinePlan
from meshtrain.models.build import build_meta_model
from meshtrain.models.fused import join_parts, split_parts
from meshtrain.models.initialize import restore_buffers
from meshtrain.models.layout import local_indices, local_tensor
from meshtrain.models.lora import make_adapters
from meshtrain.models.packed import packed_projections, unpack
from meshtrain.parallel import build_pipeline, replicas
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.parallel.experts.stacks import selection_biases
from meshtrain.parallel.packing import make_packing
from meshtrain.parallel.pipeline import Pipeline, full_tensor
from meshtrain.parallel.routers.formulas import AUXILIARY_LOSS, Z_LOSS
from meshtrain.parallel.tensor.collectives import SEQUENCE_DIM
from meshtrain.parallel.transposable import gather_along
from meshtrain.runtime.mesh import axis_size, data_rank, init_mesh
from meshtrain.training.loss_scale import build_loss_scale
from meshtrain.training.objective import CROSS_ENTROPY, build_objective
from meshtrain.training.objective import Z_LOSS as OUTPUT_Z_LOSS
from meshtrain.training.optim import build_learning_rate, build_optimizer
from meshtrain.training.self_check import check_parameters
from meshtrain.training.step import StepContext, evaluate, train_step
from meshtrain.verify.case import MICRO_BATCH_SIZE, OPTIMIZER, SEED, SEQUENCE, STEPS, ProofCase, Trace, with_noise
from meshtrain.verify.reference import keep_outputs, widen


def initial_weights(case: ProofCase) -> dict[str, Tensor]:
    """Return the random initialization of the model in one process, under the stock names."""
    layers = len(find_layers(_build(case))[1])
    alone = {"mesh": MeshPlan(dp_shard=1), "pipeline": PipelinePlan(layers_per_stage=[layers])}
    pipeline = build_on_ranks(case, case.plan.model_copy(update=alone))
    pipeline.initialize(SEED)
    return _gather(pipeline)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Hide torch's warnings about tiny models and gathered DTensors while the block runs."""
    logger = logging.getLogger(REDISTRIBUTION_LOG)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(before)


@without_warnings()
def train_plan(case: ProofCase, initial: dict[str, Tensor]) -> Trace:
    """Train the plan on these ranks for a few steps.

    Args:
        case: what to train.
        initial: stock FQN -> value, for every parameter; training starts from them with noise.

    Returns:
        The trace of this rank.
    """
    # Small gradients are reduced together, large ones one by one. With this limit those of a tiny
    # model go one by one too, as those of a real model do.
    replicas.LARGE = 1
    pipeline = build_on_ranks(case, case.plan)
    own: dict[str, Tensor] = {}
    if case.pretrained:
        for stage in pipeline.stages:
            restore_buffers(stage.model)
    else:
        pipeline.initialize(SEED)
        own = _gather(pipeline)
    # After the buffers are made: those of the stock model may be float32.
    with float32_casts_lifted():
        fill(pipeline, with_noise(initial))
        check_parameters(pipeline)
        # Other data ranks have other samples than the first microbatch of the stock model.
        watches = not case.plan.compile.enabled and data_rank(pipeline.mesh) == 0
        layers = keep_outputs(_own_layers(pipeline)) if watches else {}
        trace = train_pipeline(pipeline, case.batches(), objective=case.objective)
        if case.router.bias_update_rate:
            trace.biases = _selection_biases(pipeline)
    trace.initial, trace.layers = own, _in_full(pipeline, layers)
    return trace


def train_pipeline(
    pipeline: Pipeline,
    batches: Sequence[dict[str, Tensor]],
    optimizer: OptimizerConfig = OPTIMIZER,
    objective: ObjectiveConfig = STOCK_OBJECTIVE,
) -> Trace:
    """Train a pipeline as it is, one step for each global batch.

    Returns:
        The trace of this rank.
    """
    trace, context = Trace(), build_step_context(pipeline, optimizer, objective)
    for step, batch in enumerate(batches):
        _train_step(context, step, batch, trace)
    trace.parameters = _gather(pipeline)
    trace.evaluation = evaluate(context, [local_rows(pipeline, batches[0])]).loss
    return trace


def _in_full(pipeline: Pipeline, layers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join the parts (batch, seq/cp, hidden) of the outputs of layers, if cp has made them."""
    if pipeline.context is None:
        return layers
    part = SEQUENCE // axis_size(pipeline.mesh, CP)
    return {name: pipeline.context.joined(_over_tp(pipeline, output, part)) for name, output in layers.items()}


def _over_tp(pipeline: Pipeline, output: Tensor, length: int) -> Tensor:
    """Join an output that sequence parallelism has split, which is shorter than `length`."""
    group = pipeline.mesh.get_group(TP)
    return output if output.shape[SEQUENCE_DIM] == length else gather_along(output, SEQUENCE_DIM, group)


def fill(pipeline: Pipeline, stock: Mapping[str, Tensor]) -> None:
    """Copy stock weights into the shards of this process."""
    parts = split_parts(stock, pipeline.fused)
    canonical, packed = pipeline.canonical_names(), _packed(pipeline)
    with torch.no_grad():
        for name, parameter in pipeline.named_parameters():
            packing = make_packing(name, packed[name]) if name in packed else None
            target, value = parameter if packing is None else packing.weight, parts[canonical[name]]
            for dim, index in enumerate(local_indices(target)):
                value = value.index_select(dim, index)
            local_tensor(target).copy_(value)
            if packing is not None:
                packing.finish()


def build_step_context(
    pipeline: Pipeline, optimizer: OptimizerConfig = OPTIMIZER, objective: ObjectiveConfig = STOCK_OBJECTIVE
) -> StepContext:
    """Build what a step needs, as a run does."""
    return StepContext(
        pipeline=pipeline,
        loss=build_objective(pipeline, objective),
        optimizer=build_optimizer(pipeline, optimizer),
        learning_rate=build_learning_rate(LearningRateConfig(name="constant"), optimizer.learning_rate, STEPS),
        max_gradient_norm=optimizer.max_gradient_norm,
        loss_scale=build_loss_scale(pipeline.plan.precision),
    )


def local_rows(pipeline: Pipeline, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this process's rows of a global batch."""
    size = len(batch["input_ids"]) // axis_size(pipeline.mesh, *DATA_AXES)
    start = data_rank(pipeline.mesh) * size
    return {name: value[start : start + size] for name, value in batch.items()}


def _train_step(context: StepContext, step: int, batch: dict[str, Tensor], trace: Trace) -> None:
    pipeline = context.pipeline
    ids = np.arange(len(batch["input_ids"]))
    result = train_step(context, step, local_rows(pipeline, batch), ids)
    trace.losses.append(result.loss)
    trace.cross_entropies += [value for name, value in result.terms.items() if name == CROSS_ENTROPY]
    trace.z_losses += [value for name, value in result.terms.items() if name == OUTPUT_Z_LOSS]
    trace.router_losses += [value for name, value in result.router.items() if name == AUXILIARY_LOSS]
    trace.router_z_losses += [value for name, value in result.router.items() if name == Z_LOSS]
    trace.norms.append(result.gradient_norm)
    unclip = max(1.0, (result.gradient_norm + 1e-6) / context.max_gradient_norm)
    gradients = {
        name: full_tensor(parameter.grad).detach() * unclip
        for name, parameter in pipeline.owned_parameters().items()
        if parameter.grad is not None
    }
    trace.gradients.append(join_parts(gradients, pipeline.fused))


def _build(case: ProofCase) -> PreTrainedModel:
    model = build_meta_model(
        case.hf_config,
        dtype=torch.float64,
        attention=case.attention,
        trust_remote_code=case.trust_remote_code,
    )
    widen(model)
    return model


def build_on_ranks(case: ProofCase, plan: ParallelPlan) -> Pipeline:
    """Build the pipeline of a case under a plan, with memory for its parameters but no values."""
    model = _build(case)
    adapters = {} if case.lora.rank is None else make_adapters(model, case.lora)
    return build_pipeline(
        model,
        init_mesh(plan.mesh, "cpu"),
        plan,
        micro_batch_size=MICRO_BATCH_SIZE,
        seed=SEED,
        device=torch.device("cpu"),
        router=case.router,
        adapters=adapters,
        packs_base=case.lora.base == "nf4",
    )


def _own_layers(pipeline: Pipeline) -> dict[str, torch.nn.Module]:
    layers: dict[str, torch.nn.Module] = {}
    for stage in pipeline.stages:
        prefix = next(name for name, module in stage.model.named_modules() if module is stage.layers)
        layers |= {f"{prefix}.{stage.first_layer + index}": layer for index, layer in enumerate(stage.own_layers())}
    return layers


def _selection_biases(pipeline: Pipeline) -> dict[str, Tensor]:
    found = [bias for stage in pipeline.stages for bias in selection_biases(stage.model).values()]
    own = {id(getattr(module, name)) for module, name in found}
    return {name: buffer.clone() for name, buffer in pipeline.saved_buffers() if id(buffer) in own}


def _gather(pipeline: Pipeline) -> dict[str, Tensor]:
    whole = {name: full_tensor(p.detach()).clone() for name, p in pipeline.owned_parameters().items()}
    for name in _packed(pipeline):
        whole[name] = unpack(whole[name], whole[name].dtype)
    return join_parts(whole, pipeline.fused)


def _packed(pipeline: Pipeline) -> dict[str, Any]:
    """Return FQN of the weight -> projection, for those with packed weights."""
    return dict(entry for stage in pipeline.stages for entry in packed_projections(stage.model))
