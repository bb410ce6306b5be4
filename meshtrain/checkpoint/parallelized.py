"""Weights as they lie on the mesh, in a folder of their own: nothing is gathered, and any mesh reads it."""

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


def save_parallelized(
    pipeline: Pipeline, folder: Path, *, tokenizer: Tokenizer = None, origin: Path | None = None
) -> None:
    """Write the weights, one file per process, and what `meshtrain merge` needs to make one model of them. Collective.

    It is a checkpoint without optimizer state: loaded again on any mesh, verified like any other. Copies of the model
    are written once.

    Args:
        pipeline: with values.
        folder: must not exist, or be empty; appears when it is complete. Every machine must see the same one.
        tokenizer: to write beside the weights; None: what lies in the directory that the model came from.
        origin: that directory; None: what the configuration says.

    Raises:
        CheckpointError: the same on all processes: the folder has something in it or cannot be written.
    """
    for stage in pipeline.stages:
        # After a forward pass without a backward pass they would be gathered over dp_shard.
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
    """Return checkpoint key -> what lies on this process."""
    return {f"{MODEL_PREFIX}{name}": tensor for name, tensor in owned_tensors(pipeline).items()}


def weights_manifest(pipeline: Pipeline, *, step: int = 0) -> Manifest:
    """Describe a checkpoint of weights alone, which belongs to no run."""
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
