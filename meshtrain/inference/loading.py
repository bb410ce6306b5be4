"""Find and load a model to generate from: a Hugging Face folder, or a checkpoint."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, PretrainedConfig

from meshtrain.checkpoint.manifest import Manifest, read_manifest
from meshtrain.checkpoint.storage.directory import HUGGINGFACE_NAME, find_checkpoint
from meshtrain.checkpoint.storage.location import local_path, open_location
from meshtrain.config.families import with_family
from meshtrain.config.plan import ParallelPlan, PrecisionPlan
from meshtrain.config.run import ModelConfig
from meshtrain.errors import CheckpointError, ModelError
from meshtrain.models.build import build_meta_model, load_hf_config, stored_generation_config
from meshtrain.models.dtypes import dtype_name
from meshtrain.models.initialize import restore_buffers
from meshtrain.models.lora import make_adapters
from meshtrain.models.refusals import refusal_reason
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.packing import check_packing
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.pretrained import load_pretrained
from meshtrain.parallel.tensor.adapters import check_adapters_of
from meshtrain.runtime.location import Location
from meshtrain.runtime.mesh import init_mesh
from meshtrain.training.frozen_base import load_base
from meshtrain.training.state import load_weights_of


@dataclass(frozen=True)
class ModelSource:
    """A model on disk.

    Attributes:
        location: the folder or checkpoint that holds the weights.
        directory: the folder that holds the configuration and the tokenizer.
        manifest: manifest of a checkpoint; None for a Hugging Face folder.
    """

    location: Location
    directory: Path
    manifest: Manifest | None = None

    def __str__(self) -> str:
        return str(self.location)

    @property
    def is_checkpoint(self) -> bool:
        """Return whether it is a checkpoint; otherwise it is a Hugging Face folder."""
        return self.manifest is not None

    def tokenizer(self) -> Any:
        """Load the tokenizer.

        Raises:
            ModelError: if there is none.
        """
        try:
            return AutoTokenizer.from_pretrained(self.directory)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self} holds no tokenizer: {refusal_reason(error)}") from error

    def config(self) -> PretrainedConfig:
        """Load the configuration.

        Raises:
            ModelError: if it does not describe a causal language model.
        """
        return load_hf_config(ModelConfig(path=str(self.directory)))


def find_model_source(source: str, stack: ExitStack) -> ModelSource:
    """Find a model.

    Args:
        source: a Hugging Face folder, a checkpoint, or a run directory, of which the newest
            checkpoint is used; may be a URL.
        stack: closed by the caller when the files are not needed any more.

    Raises:
        ModelError: if there is no model.
        CheckpointError: if the location cannot be reached, or the checkpoint is of another version.
    """
    location = open_location(source)
    if isinstance(location, Path) and (location / "config.json").is_file():
        return ModelSource(location, location)
    try:
        checkpoint = find_checkpoint(location)
    except CheckpointError as error:
        raise ModelError(
            f"{source} holds neither a Hugging Face model (no config.json) nor a checkpoint ({error})"
        ) from error
    return ModelSource(
        checkpoint, stack.enter_context(local_path(checkpoint / HUGGINGFACE_NAME)), read_manifest(checkpoint)
    )


def pipeline_from(
    source: ModelSource,
    config: PretrainedConfig,
    plan: ParallelPlan,
    device: torch.device,
    *,
    with_base: bool = True,
    computes: bool = True,
) -> Pipeline:
    """Lay a model out on the processes. Collective.

    Its number format is the one that the manifest, or else the configuration, names.

    Args:
        source: the model.
        config: of the model.
        plan: how the model is laid out.
        device: of this process.
        with_base: of a checkpoint that holds adapters alone: whether the model beside them gets
            values.
        computes: whether the model will compute, so that its modules need one number format.
            Otherwise those that trained keep theirs.

    Raises:
        PlanError: if the plan does not fit the model or the number of processes.
        ModelError: if the weights are incomplete, or belong to another model.
        CheckpointError: the same, for a checkpoint.
    """
    dtype: Any = source.manifest.dtype if source.manifest else dtype_name(config.dtype or "float32")
    model = build_meta_model(config, dtype=getattr(torch, dtype), attention=None)
    world_size = dist.get_world_size()
    # Not validated: a model can generate in number formats in which it cannot be trained.
    precision = PrecisionPlan.model_construct(parameters=dtype, compute=dtype, reduce=dtype)
    tensor = plan.tensor.model_copy(update={"loss_parallel": False})
    plan = with_family(plan.model_copy(update={"precision": precision, "tensor": tensor}), config.model_type)
    num_stages = plan.mesh.pp * plan.pipeline.stages_per_rank
    # Any length that all axes divide: generation itself divides no sequence.
    length = 2 * plan.mesh.cp * plan.mesh.tp
    plan = resolve_plan(plan, model, BatchShape(world_size * num_stages, 1, length), world_size)
    base = None if source.manifest is None else source.manifest.base
    adapters = {} if base is None else make_adapters(model, base.lora, saved_dtype=model.dtype if computes else None)
    check_adapters_of(model, adapters, plan)
    if base is not None:
        check_packing(model, base.lora, plan)
    mesh = init_mesh(plan.mesh, device.type)
    pipeline = build_pipeline(
        model,
        mesh,
        plan,
        micro_batch_size=1,
        seed=0,
        device=device,
        adapters=adapters,
        base_is_elsewhere=base is not None,
        packs_base=base is not None and base.lora.base == "nf4",
    )
    if (generation := stored_generation_config(source.directory)) is not None:
        pipeline.set_generation_config(generation)
    if base is not None:
        if with_base:
            load_base(source.location, base, pipeline)
        load_weights_of(source.location, pipeline)
    elif source.is_checkpoint:
        for stage in pipeline.stages:
            restore_buffers(stage.model)
        load_weights_of(source.location, pipeline)
    else:
        load_pretrained(pipeline, source.directory)
    return pipeline
