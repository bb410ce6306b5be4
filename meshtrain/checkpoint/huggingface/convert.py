"""Convert a checkpoint to a Hugging Face folder, or a Hugging Face folder to a checkpoint."""

import shutil
from pathlib import Path
from typing import Literal

import torch
from transformers import PretrainedConfig

from meshtrain import console
from meshtrain.checkpoint.dcp.store import write_checkpoint
from meshtrain.checkpoint.huggingface.export import ORIGINAL, export_checkpoint
from meshtrain.checkpoint.parallelized import weights_manifest, weights_of
from meshtrain.checkpoint.storage.directory import checkpoint_directory, is_checkpoint
from meshtrain.checkpoint.storage.named_folder import locked_together
from meshtrain.checkpoint.storage.publishing import Retention
from meshtrain.config.families import with_family
from meshtrain.config.plan import ParallelPlan, PrecisionPlan
from meshtrain.config.run import ModelConfig
from meshtrain.errors import CheckpointError
from meshtrain.models.build import build_meta_model, load_hf_config, stock_class
from meshtrain.models.dtypes import DTYPES
from meshtrain.models.weights.safetensors_files import INDEX_NAME
from meshtrain.models.whole.causal_class import is_half
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.pretrained import load_pretrained
from meshtrain.runtime.environment import world_size_from_environment
from meshtrain.runtime.location import Location
from meshtrain.runtime.mesh import init_mesh
from meshtrain.runtime.process import process_group

# The small files of a Hugging Face folder: configurations, tokenizers, chat templates.
_BESIDE_WEIGHTS = ("*.json", "*.txt", "*.model", "*.jinja")


def convert(source: Location, target: Location, *, dtype: str = ORIGINAL) -> None:
    """Convert a checkpoint to a Hugging Face folder, or such a folder to a checkpoint of weights.

    A checkpoint that is made from a folder has no optimizer state. A new run can start from it
    (`model.path`), but it cannot be resumed.

    Args:
        source: a checkpoint, a run directory (its newest checkpoint), or a local Hugging Face
            folder.
        target: the folder to write; for a new checkpoint, the directory in which `step-0` appears.
        dtype: number format of the folder's weights, by name. A new checkpoint keeps that of the
            folder.

    Raises:
        UserError: if the source is neither, or the target exists.
    """
    if isinstance(source, Path) and (source / "config.json").is_file():
        if dtype != ORIGINAL:
            raise CheckpointError(
                f"--dtype {dtype} is for what is written as a Hugging Face folder, and {source} is one already",
                "leave it out",
            )
        _import(source, target)
    elif isinstance(target, Path):
        export_checkpoint(source, target, dtype=dtype)
    else:
        raise CheckpointError(
            f"{target} is a URL, but a Hugging Face folder is written to a local directory", "use a local one"
        )


def _import(folder: Path, root: Location) -> None:
    checkpoint = checkpoint_directory(root, 0)
    if is_checkpoint(checkpoint):
        raise CheckpointError(f"{checkpoint} exists", "convert into another directory")
    hf_config = load_hf_config(ModelConfig(path=str(folder)))
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if hf_config.dtype == torch.bfloat16 else "float32"
    plan = with_family(
        ParallelPlan(precision=PrecisionPlan(parameters=dtype, compute=dtype)),
        hf_config.model_type,
    )
    model = build_meta_model(hf_config, dtype=DTYPES[dtype], attention="eager")
    world_size = world_size_from_environment()
    plan = resolve_plan(plan, model, BatchShape(world_size, 1, 1), world_size)
    with process_group() as device:
        mesh = init_mesh(plan.mesh, device.type)
        pipeline = build_pipeline(model, mesh, plan, micro_batch_size=1, seed=0, device=device)
        with locked_together(root):
            load_pretrained(pipeline, folder)
            write_checkpoint(
                root,
                weights_of(pipeline),
                manifest=weights_manifest(pipeline),
                huggingface=lambda directory: _describe(folder, directory, hf_config),
                retention=Retention(newest=1),
            )
    console.line(f"{checkpoint} holds the weights of {stock_class(model).__name__}; train from it with model.path")


def _describe(folder: Path, directory: Path, config: PretrainedConfig) -> None:
    for pattern in _BESIDE_WEIGHTS:
        for file in folder.glob(pattern):
            if file.name != INDEX_NAME:
                shutil.copy(file, directory)
    if is_half(config):
        # The configuration of the folder is that of the whole model.
        config.save_pretrained(directory)
