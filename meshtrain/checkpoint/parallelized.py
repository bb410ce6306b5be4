"""Save weights as they are sharded on the mesh. Nothing is gathered, and any mesh can load them."""

import importlib.metadata
from functools import partial
from pathlib import Path

from torch import Tensor

from meshtrain import console
from meshtrain.checkpoint.dcp.store import MODEL_PREFIX, save_folder
from meshtrain.checkpoint.huggingface.description import Tokenizer, write_description
from meshtrain.checkpoint.huggingface.pretrained import original_dtype, owned_tensors
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.storage.directory import step_named
from meshtrain.config.toml import plan_hash
from meshtrain.models.build import stock_class
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.shard import reshard
from meshtrain.runtime.agreement import is_first_rank

LIBRARIES = ("torch", "transformers", "meshtrain")


def write_parallelized(
    pipeline: Pipeline, folder: Path, *, tokenizer: Tokenizer = None, origin: Path | None = None
) -> None:
    """Write the weights, one file per process, and what `meshtrain merge` needs. Collective.

    The folder is a checkpoint without optimizer state: it can be loaded on any mesh, and is
    verified like any other. Copies of the model are written once. `meshtrain merge` makes one model
    from the files.

    Args:
        pipeline: with values.
        folder: must not exist, or be empty. It appears when it is complete. Every machine must see
            the same one.
        tokenizer: written beside the weights. None: the one in the directory that the model came
            from.
        origin: that directory. None: the one that the configuration names.

    Raises:
        CheckpointError: the same on all processes, if the folder is not empty or cannot be written.
    """
    for stage in pipeline.stages:
        # After a forward pass without a backward pass, parameters would still be gathered over
        # dp_shard.
        reshard(stage.model)
    folder = folder.absolute()
    save_folder(
        folder,
        weights_of(pipeline),
        manifest=weights_manifest(pipeline, step=step_named(folder) or 0),
        huggingface=partial(
            write_description,
            model=pipeline.stages[0].model,
            tokenizer=tokenizer,
            dtype=original_dtype(pipeline),
            origin=origin,
        ),
    )
    if is_first_rank():
        console.line(f"{folder} holds the weights of {stock_class(pipeline.stages[0].model).__name__}")


def weights_of(pipeline: Pipeline) -> dict[str, Tensor]:
    """Return checkpoint key -> the part of the tensor that this process holds."""
    return {f"{MODEL_PREFIX}{name}": tensor for name, tensor in owned_tensors(pipeline).items()}


def weights_manifest(pipeline: Pipeline, *, step: int = 0) -> Manifest:
    """Return the manifest of a checkpoint that holds weights alone and belongs to no run."""
    model, plan = pipeline.stages[0].model, pipeline.plan
    return Manifest(
        step=step,
        seed=0,
        global_batch_size=0,
        mesh=plan.mesh.degrees,
        plan_hash=plan_hash(plan),
        model_type=model.config.model_type,
        architecture=stock_class(model).__name__,
        data_identity="",
        dtype=plan.precision.parameters,
        fused=pipeline.fused,
        tied=dict(model.all_tied_weights_keys),
        versions={library: importlib.metadata.version(library) for library in LIBRARIES},
    )
