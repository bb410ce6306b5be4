"""The parts of a parallel model: mesh, model on the meta device, weights, gradient norm."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel

from meshtrain.api.arguments import resolve_dtype
from meshtrain.api.handle import handle_of
from meshtrain.checkpoint.manifest import read_manifest
from meshtrain.checkpoint.storage.directory import MANIFEST_NAME
from meshtrain.compat.initialization import forget_marks
from meshtrain.compat.transformers import is_made_of_configuration
from meshtrain.config.arguments import check_flag, path_text, positive_number, whole_number, wrong
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.run import ModelConfig
from meshtrain.config.toml import read_plan
from meshtrain.errors import ModelError
from meshtrain.models.adapters import initialize_adapters, without_adapters
from meshtrain.models.build import build_meta_model, load_hf_config, local_directory, stored_generation_config
from meshtrain.models.initialize import restore_buffers
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.pretrained import load_pretrained
from meshtrain.runtime.agreement import check_alike, failing_together
from meshtrain.runtime.mesh import init_mesh
from meshtrain.runtime.process import join_for_script
from meshtrain.training.gradients import gradient_norm, scale_gradients
from meshtrain.training.same_model import check_same_kind
from meshtrain.training.state import load_weights_of


def build_mesh(plan: ParallelPlan | Mapping[str, Any] | str | Path) -> DeviceMesh:
    """Build the device mesh of a plan. Collective; joins the process group if that is not done yet.

    Args:
        plan: as for `parallelize`; only the degrees of the mesh are used, such as `{"mesh": {"pp":
            2, "tp": 2}}`.

    Returns:
        The mesh with all axes of a plan, including those of size 1.

    Raises:
        ConfigError: if the plan is wrong.
        PlanError: if the product of its degrees is not the number of processes.

    Source: torch.distributed.device_mesh.init_device_mesh; torchtitan's axes (arXiv:2410.06511), tp
    innermost as in Megatron-LM (arXiv:2104.04473).
    """
    degrees = read_plan(plan).mesh
    device = join_for_script()
    return init_mesh(degrees.resolve(dist.get_world_size()), device.type)


def build_model(
    source: str | Path | PretrainedConfig,
    *,
    dtype: torch.dtype | str = torch.float32,
    attention: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build a causal LM on the meta device: its complete structure, without memory for parameters.

    Args:
        source: a Hugging Face directory, a hub id, a checkpoint of meshtrain, or a configuration.
        dtype: of every parameter, whatever the configuration says: a torch dtype or its name.
        attention: an attention implementation of transformers; None: that of the configuration if
            it names one, else the default of transformers for this class.
        trust_remote_code: run Python code that comes with the model.

    Returns:
        The stock model in training mode. Pass it to `parallelize`, then call `load_weights` or
        `initialize`.

    Raises:
        ModelError: if there is no such model, or transformers refuses the configuration.

    Source: transformers.AutoModelForCausalLM.from_config, under torch.device("meta").
    """
    call, kind = "build_model", ModelError
    dtype = resolve_dtype(f"{call}: dtype", dtype, kind)
    check_flag(f"{call}: trust_remote_code", trust_remote_code, kind)
    if not isinstance(attention, str | None):
        raise wrong(f"{call}: attention", attention, "'eager', 'sdpa' or another name of transformers", kind)
    config, generation = source, None
    if not isinstance(config, PretrainedConfig):
        path = path_text(f"{call}: source", source, kind, wanted="a directory, a hub id or a configuration")
        config = load_hf_config(ModelConfig(path=path, trust_remote_code=trust_remote_code))
        generation = stored_generation_config(local_directory(path, asked=f"{call}: source"))
    original = config.dtype
    model = build_meta_model(
        copy.deepcopy(config), dtype=dtype, attention=attention, trust_remote_code=trust_remote_code
    )
    # `save_pretrained` writes this dtype by default, so training in float32 does not change the
    # dtype of the saved model.
    model.config.dtype = dtype if original is None else original
    if generation is not None:
        model.generation_config = generation
    return model


def initialize(model: Any, seed: int = 0) -> None:
    """Initialize a parallel model as Hugging Face would, bit-identical on every mesh.

    Args:
        model: what `parallelize` returned for a model on meta.
        seed: seed of the random values, any integer.

    Raises:
        ModelError: for a parameter whose rule cannot be repeated on every mesh; on all ranks alike,
            if their seeds differ.

    Source: the rules of each model in transformers (PreTrainedModel._init_weights), drawn tile by
    tile.
    """
    handle = handle_of(model)
    seed = whole_number("initialize: seed", seed, ModelError)
    check_alike("initialize", {"seed": seed}, ModelError)
    for stage in handle.pipeline.stages:
        for parameter in stage.model.parameters():
            # Parameters that have values already are drawn again too.
            forget_marks(parameter)
    handle.pipeline.initialize(seed)
    handle.has_values = True


def load_weights(model: Any, folder: str | Path, *, enlarge_vocabulary: bool = False) -> None:
    """Fill a parallel model from files. Collective; each rank reads only what it keeps.

    Args:
        model: what `parallelize` returned, for a model on meta or one whose values are to be
            replaced. LoRA adapters of a model on meta get the initial values of peft, with the seed
            of `parallelize`; adapters that have values keep them.
        folder: a local Hugging Face directory with safetensors, what `save_parallelized` wrote, a
            checkpoint of a run, or a hub id. Values are cast to the dtype of the parameters.
        enlarge_vocabulary: where the model was built with a larger `vocab_size` than the Hugging
            Face directory has, fill the new rows of embedding and head with the mean of the others.

    Raises:
        ModelError: on all ranks alike: files are missing or broken, they hold another model, the
            vocabulary of a checkpoint is to be enlarged, or the ranks name different folders.
        CheckpointError: on all ranks alike, for a checkpoint.

    Source: the layouts of the hub, transformers.conversion_mapping and
    transformers.core_model_loading.
    """
    handle = handle_of(model)
    pipeline = handle.pipeline
    folder = path_text("load_weights: folder", folder, ModelError, wanted="a directory or a hub id")
    check_flag("load_weights: enlarge_vocabulary", enlarge_vocabulary, ModelError)
    if not handle.has_values:
        for stage in pipeline.stages:
            with without_adapters(stage.model) as adapters:
                initialize_adapters(stage.model, adapters, seed=pipeline.streams.seed)
    directory = _find_folder(folder)
    check_alike("load_weights", {"folder": folder, "enlarge_vocabulary": enlarge_vocabulary}, ModelError)
    if (directory / MANIFEST_NAME).is_file():
        if enlarge_vocabulary:
            raise ModelError(
                f"{folder} is a checkpoint, whose tensors are read as they are, but enlarge_vocabulary = True adds "
                "rows",
                f"run `meshtrain merge {folder} OUT`, and load OUT",
            )
        for stage in pipeline.stages:
            restore_buffers(stage.model)
        check_same_kind(directory, read_manifest(directory), pipeline.stages[0].model.config)
        load_weights_of(directory, pipeline)
    else:
        load_pretrained(pipeline, directory, enlarge_vocabulary=enlarge_vocabulary)
    _take_generation_config(directory, pipeline)
    handle.source = str(directory)
    handle.has_values = True


def _take_generation_config(directory: Path, pipeline: Pipeline) -> None:
    """Use the generation configuration of the files, unless the program has set one."""
    generation = stored_generation_config(directory)
    own = getattr(pipeline.stages[0].model, "generation_config", None)
    if generation is not None and own is not None and is_made_of_configuration(own):
        pipeline.set_generation_config(generation)


def _find_folder(folder: str | Path) -> Path:
    """Return the directory that holds the weights, if every rank finds it. Collective."""
    directory = Path(folder)
    with failing_together(ModelError):
        if not (directory / MANIFEST_NAME).is_file():
            directory = local_directory(folder, asked="folder")
    return directory


@torch.no_grad()
def clip_grad_norm(model: Any, max_norm: float) -> Tensor:
    """Scale the gradients of a parallel model down to a norm of at most `max_norm`. Collective.

    The norm is that of the complete model over all ranks, and a tied weight counts once.
    `torch.nn.utils.clip_grad_norm_` would use only the gradients stored on one rank.

    Args:
        model: what `parallelize` returned, after a backward pass.
        max_norm: in the unit of the norm (nats per unit of a parameter); `inf` only measures.

    Returns:
        () float64, the norm before clipping, the same on every rank.

    Raises:
        ModelError: if the model is not parallel.
        ConfigError: if `max_norm` is not a number above 0.

    Source: Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks"
    (arXiv:1211.5063).
    """
    pipeline = handle_of(model).pipeline
    # A negative value would reverse the gradients.
    max_norm = positive_number("clip_grad_norm: max_norm", max_norm, wanted="a number above 0, or inf to measure only")
    (norm,) = gradient_norm(pipeline)
    scale_gradients([parameter for _, parameter in pipeline.trainable_parameters()], norm, max_norm)
    return norm
