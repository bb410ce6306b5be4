"""The teacher: a frozen model from a folder, laid out on the mesh of the run."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME

from meshtrain.checkpoint.storage.directory import MANIFEST_NAME
from meshtrain.config.distillation import DistillationConfig
from meshtrain.config.families import with_family
from meshtrain.config.plan import (
    PRECISIONS,
    ContextPlan,
    LossPlan,
    ParallelPlan,
    PipelinePlan,
    PrecisionPlan,
    RecomputePlan,
)
from meshtrain.config.run import ModelConfig, RunConfig
from meshtrain.errors import ConfigError, ModelError, PlanError, UserError
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.models.dtypes import DTYPES
from meshtrain.models.rotary import constant_length
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.check.head import find_base_apart
from meshtrain.parallel.head.apart import HeadApart
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.training.distillation.passes import BuiltTeacher

ASKED = "distillation.teacher"
_REAL: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True)
class Teacher:
    """A teacher that fits its run, in a form that can be sent to other processes.

    Attributes:
        config: of the run.
        hf_config: of the model.
        attention: its implementation.
        plan: that of the run, resolved for this model.
        base: with a pipeline, the name of the base model, whose results are kept until the logits
            are needed; None for a class of which the logits are kept.
    """

    config: DistillationConfig
    hf_config: PretrainedConfig
    attention: str
    plan: ParallelPlan
    base: str | None = None

    def build_model(self) -> PreTrainedModel:
        """Return the stock model on the meta device, frozen."""
        return _frozen_model(self.hf_config, self.attention, self.plan)

    def build(
        self, beside: Pipeline, device: torch.device, allocation: AbstractContextManager[Any] = _REAL
    ) -> BuiltTeacher:
        """Return the model with memory for its parameters, without values. Collective.

        Args:
            beside: the pipeline of the model that trains.
            device: as for `meshtrain.parallel.build_pipeline`, like `allocation`.
            allocation: see there.
        """
        pipeline = build_pipeline(
            self.build_model(),
            beside.mesh,
            self.plan,
            micro_batch_size=beside.micro_batch_size,
            seed=0,
            device=device,
            allocation=allocation,
            peers=beside.peers,
        )
        for stage in pipeline.stages:
            stage.model.eval()
        last = pipeline.stages[-1]
        if self.base is None or not last.is_last:
            return BuiltTeacher(pipeline)
        keeps = self.plan.shard.reshard_after_forward == "never"
        return BuiltTeacher(pipeline, HeadApart(last.model, self.base, last.channel, keeps_gathered=keeps))


def resolve_teacher(config: RunConfig, model: PreTrainedModel, plan: ParallelPlan, batch: BatchShape) -> Teacher | None:
    """Return the teacher of a run, checked against it; None if the run has none.

    Args:
        config: of the run.
        model: that trains.
        plan: of the run, resolved.
        batch: shape of its batches.

    Raises:
        UserError: if the folder holds no such model, or the plan does not fit it.
    """
    if config.distillation.teacher is None:
        return None
    hf_config = _load_config(config)
    _check_vocabulary(hf_config, model)
    own = config.plan.model_copy(
        update={
            "mesh": plan.mesh,
            "pipeline": _pipeline(config.plan.pipeline),
            "context": _context(plan.context),
            "precision": _precision(plan.precision),
            "recompute": RecomputePlan(),
            "loss": LossPlan(chunk_tokens=0),
        }
    )
    own = with_family(own, hf_config.model_type)
    try:
        built = _frozen_model(hf_config, config.model.attention, own)
        own = resolve_plan(own, built, batch, plan.mesh.world_size)
    except UserError as error:
        raise PlanError([problem.concerning(ASKED) for problem in error.problems]) from error
    constant = constant_length(built)
    if constant is not None and constant < batch.sequence_length:
        raise ModelError(
            f"{ASKED}: sequences of more than {constant:,} tokens change the rotary frequencies of this "
            f"{type(built).__name__} for all others in their batch",
            f"set data.sequence_length = {constant:,} or less, or take another teacher",
        )
    base = find_base_apart(own, built) if own.mesh.pp > 1 else None
    return Teacher(config.distillation, hf_config, config.model.attention, own, base)


def _frozen_model(hf_config: PretrainedConfig, attention: str, plan: ParallelPlan) -> PreTrainedModel:
    model = build_meta_model(hf_config, dtype=DTYPES[plan.precision.parameters], attention=attention)
    for parameter in model.parameters():
        parameter.requires_grad = False
    return model


def _load_config(config: RunConfig) -> PretrainedConfig:
    path = Path(str(config.distillation.teacher))
    if (path / MANIFEST_NAME).is_file():
        raise ConfigError(f"{ASKED} = {str(path)!r} is a checkpoint", "export it, and set it to the exported directory")
    if not (path / CONFIG_NAME).is_file():
        found = "the directory holds no config.json" if path.is_dir() else "there is no such directory"
        raise ConfigError(f"{ASKED} = {str(path)!r}: {found}", "set it to the local directory of a Hugging Face model")
    try:
        return load_hf_config(ModelConfig(path=str(path)))
    except UserError as error:
        # The path is that of the teacher, and not the setting that such a problem names.
        problems = [replace(it, found=it.found.removeprefix("model.path = ")) for it in error.problems]
        raise ModelError([problem.concerning(ASKED) for problem in problems]) from error


def _check_vocabulary(hf_config: PretrainedConfig, model: PreTrainedModel) -> None:
    theirs, own = (it.get_text_config().vocab_size for it in (hf_config, model.config))
    if theirs != own:
        raise ModelError(
            f"{ASKED}: its vocabulary has {theirs:,} tokens, and that of the model {own:,}, so their logits cannot be "
            "compared",
            "use a teacher with the tokenizer of the model",
        )


def _pipeline(pipeline: PipelinePlan) -> PipelinePlan:
    """Return the pipeline of a teacher: its own layers, in stages on the same processes."""
    if pipeline.split_at is None and not isinstance(pipeline.layers_per_stage, list):
        return pipeline
    # These are layers of the model.
    return pipeline.model_copy(update={"layers_per_stage": "balanced", "split_at": None})


def _context(context: ContextPlan) -> ContextPlan:
    """Return how the attention of a teacher sees full sequences: its logits are of the same tokens.

    Args:
        context: of the model, resolved.
    """
    # The numbers of heads may differ.
    return context if context.method == "all_gather" else context.model_copy(update={"method": "auto"})


def _precision(precision: PrecisionPlan) -> PrecisionPlan:
    """Return the number formats of a model that only computes: its parameters need no wider one."""
    compute = precision.activations
    reduce = PRECISIONS.get((compute, compute))
    if reduce is None:
        return precision
    # Both are possible, and no gradient is reduced.
    return PrecisionPlan.model_validate({"parameters": compute, "compute": compute, "reduce": reduce[-1]})
