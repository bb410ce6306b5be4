"""Export a checkpoint as a Hugging Face model: one CPU process, one tensor in memory at a time."""

import json
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from transformers import PreTrainedModel

from meshtrain import console
from meshtrain.checkpoint.dcp.reading import read_metadata, read_tensors, tensor_entries
from meshtrain.checkpoint.dcp.store import AVERAGE_PREFIX, MODEL_PREFIX
from meshtrain.checkpoint.huggingface.layout import (
    FLOATS,
    MAX_SHARD_SIZE,
    HubLayout,
    Tensors,
    check_names,
    layout_of,
    plain_layout,
    plan_files,
    stock_class_named,
)
from meshtrain.checkpoint.huggingface.stock_tensors import StockTensor, stock_tensors
from meshtrain.checkpoint.huggingface.whole import check_no_dtype, whole_layout, write_whole_description
from meshtrain.checkpoint.huggingface.writer import FileWriter, copy_kept, write_index
from meshtrain.checkpoint.manifest import Manifest, read_manifest
from meshtrain.checkpoint.storage.directory import (
    HUGGINGFACE_NAME,
    MANIFEST_NAME,
    USE_ANOTHER,
    find_checkpoint,
    is_checkpoint,
)
from meshtrain.checkpoint.storage.integrity import find_damage
from meshtrain.checkpoint.storage.location import local_path, shown_location
from meshtrain.checkpoint.storage.named_folder import check_new, locked_folder, written_completely
from meshtrain.errors import CheckpointError, Problem, name_some
from meshtrain.models.adapters import is_adapter_parameter
from meshtrain.models.build import stock_model
from meshtrain.models.dtypes import dtype_name
from meshtrain.models.whole.causal_class import causal_class
from meshtrain.models.whole.folder import half_config_at, half_of, whole_config_at
from meshtrain.runtime.location import Location

ORIGINAL = "original"


def export_checkpoint(
    checkpoint: Location,
    folder: Path,
    *,
    dtype: str = ORIGINAL,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    ema: bool = False,
) -> None:
    """Write a checkpoint's weights, configuration and tokenizer as a Hugging Face model.

    For the language half of a multimodal model, the whole folder is written: all other tensors and
    files are copied from the one that the half came from.

    Args:
        checkpoint: a step-N directory, or a run directory, whose newest checkpoint is taken.
        folder: receives the model. It appears when it is complete.
        dtype: number format of the weights, by name. "original": the one in the model's
            configuration before the training, or that of the training if there was none.
        max_shard_size: of a safetensors file, in bytes or as in "5GB". A larger tensor has its own
            file. Peak memory is the size of the largest tensor, or twice that where the hub keeps
            it in another form.
        ema: whether to write the average of the weights instead of the weights.

    Raises:
        CheckpointError: if no intact checkpoint is found, the checkpoint lacks a tensor of the
            model or holds others, or has no average of the weights, the folder is not empty or
            another process writes into it, or the disk is full.
        ModelError: if the folder of a multimodal model, whose language half the checkpoint holds,
            is gone or has changed.
    """
    check_new(folder)
    source = find_checkpoint(checkpoint)
    if source != checkpoint:
        console.line(f"{source} is the newest checkpoint")
    manifest = _write_folder(source, folder, dtype, max_shard_size, ema=ema)
    average = ", the average of its weights," if ema else ""
    console.line(f"{folder} holds {_shown(folder, manifest)}{average} of step {manifest.step}")


def merge(source: Location, folder: Path, *, dtype: str = ORIGINAL, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
    """Convert the output of `save_parallelized` to a Hugging Face model.

    Arguments and errors are those of `export_checkpoint`.

    Args:
        source: the folder that `save_parallelized` wrote, or any checkpoint.
    """
    check_new(folder)
    if not is_checkpoint(source):
        found = f"has no {MANIFEST_NAME}" if source.is_dir() else "is not a directory"
        raise CheckpointError(
            f"{shown_location(source)} {found}", "use a folder that save_parallelized wrote, or a step-N directory"
        )
    manifest = _write_folder(source, folder, dtype, max_shard_size)
    console.line(f"{folder} holds {_shown(folder, manifest)}")


def _shown(folder: Path, manifest: Manifest) -> str:
    """Return the name of the class in a folder: the language half is within a whole model."""
    whole = whole_config_at(folder)
    return manifest.architecture if whole is None else f"{(whole.architectures or ['?'])[0]} with the language half"


def list_stock_tensors(source: Location, metadata: Metadata, manifest: Manifest) -> dict[str, StockTensor]:
    """Return stock name -> tensor of the stock model, in an order that does not depend on the mesh.

    Raises:
        CheckpointError: if the checkpoint does not hold what its manifest names, or holds adapters.
    """
    found = list_saved_tensors(source, metadata, manifest)
    if any(map(is_adapter_parameter, found)):
        raise CheckpointError(
            f"{source} holds LoRA adapters, which are not part of a stock model",
            "for a checkpoint of a run: meshtrain export --merge-adapters; in a program load it into the adapted model "
            "(meshtrain.load_checkpoint) and call meshtrain.save_pretrained(model, folder, merge_adapters=True)",
        )
    return found


def list_saved_tensors(source: Location, metadata: Metadata, manifest: Manifest) -> dict[str, StockTensor]:
    """Return stock name -> tensor as `list_stock_tensors` does, also for adapters.

    Raises:
        CheckpointError: if the checkpoint does not hold what its manifest names.
    """
    shapes = {
        key.removeprefix(MODEL_PREFIX): tuple(entry.size)
        for key, entry in tensor_entries(metadata, MODEL_PREFIX).items()
    }
    if absent := sorted({part for entry in manifest.fused for part in entry.parts} - shapes.keys()):
        raise CheckpointError(
            Problem(f"{source} lacks parts that its manifest names: {name_some(absent)}", USE_ANOTHER)
        )
    return stock_tensors(shapes, manifest.fused, left_out=manifest.tied)


def _write_folder(
    source: Location, folder: Path, dtype: str, max_shard_size: int | str, *, ema: bool = False
) -> Manifest:
    folder = folder.absolute()
    with locked_folder(folder):
        return _write_locked(source, folder, dtype, max_shard_size, ema=ema)


def _write_locked(source: Location, folder: Path, dtype: str, max_shard_size: int | str, *, ema: bool) -> Manifest:
    if damage := find_damage(source):
        raise CheckpointError(replace(problem, advice=USE_ANOTHER) for problem in damage)
    manifest, metadata = read_manifest(source), read_metadata(source)
    if f"{HUGGINGFACE_NAME}/config.json" not in manifest.files:
        raise CheckpointError(f"{source} has no {HUGGINGFACE_NAME}/config.json", "put the model's configuration there")
    tensors = list_stock_tensors(source, metadata, manifest)
    averaged = tensor_entries(metadata, AVERAGE_PREFIX).keys() if ema else frozenset()
    if ema and not averaged:
        raise CheckpointError(
            f"{shown_location(source)} has no average of the weights", "leave --ema out, or train with ema.decay"
        )
    with local_path(source / HUGGINGFACE_NAME) as description:
        chosen = _chosen_dtype(dtype, description, manifest)
        model = _stock_model(description, manifest, chosen)
        if model is not None:
            check_names(source, {name: tensor.shape for name, tensor in tensors.items()}, model)
        found = None if model is None else half_of(model.config)
        if found is not None:
            check_no_dtype(f"--dtype {dtype}" if dtype != ORIGINAL else "")
            layout = whole_layout(*found)
        elif model is not None:
            layout = layout_of(model, {name: FLOATS[dtype] for name, dtype in manifest.dtypes.items()})
        else:
            layout = _module_layout(metadata, tensors, chosen)
        with written_completely(folder) as temporary:
            if found is not None and model is not None:
                write_whole_description(temporary, found[1], model.config, None, origin=description)
            else:
                _copy_description(description, temporary, manifest, chosen)
            _write_tensors(
                temporary, layout, max_shard_size, partial(_read, source, metadata, tensors, layout, averaged)
            )
    return manifest


def _chosen_dtype(dtype: str, description: Path, manifest: Manifest) -> torch.dtype:
    if dtype != ORIGINAL:
        return FLOATS[dtype]
    values = json.loads((description / "config.json").read_text())
    original = values.get("dtype") or values.get("torch_dtype")
    # If the configuration names no format or one outside `FLOATS`, that of the training is kept.
    return FLOATS.get(original, FLOATS[manifest.dtype])


def _stock_model(description: Path, manifest: Manifest, dtype: torch.dtype) -> PreTrainedModel | None:
    """Return the model on meta, or None for a class with its own code, which is not run here."""
    kind = stock_class_named(manifest.architecture)
    if kind is not None:
        assert kind.config_class is not None
        return stock_model(kind, kind.config_class.from_pretrained(description), dtype)
    # The class of some language halves is not in transformers.
    config = half_config_at(description)
    kind = None if config is None else causal_class(config)
    return None if kind is None or config is None else stock_model(kind, config, dtype)


def _module_layout(metadata: Metadata, tensors: dict[str, StockTensor], dtype: torch.dtype) -> HubLayout:
    """Return the layout of a class with its own code.

    transformers has no conversion for such a class, so the layout is that of its modules.
    """
    saved = tensor_entries(metadata, MODEL_PREFIX)
    formats = {name: saved[f"{MODEL_PREFIX}{tensor.parts[0]}"].properties.dtype for name, tensor in tensors.items()}
    return plain_layout(
        {
            name: (tensor.shape, dtype if formats[name].is_floating_point else formats[name])
            for name, tensor in tensors.items()
        }
    )


def _copy_description(description: Path, folder: Path, manifest: Manifest, dtype: torch.dtype) -> None:
    shutil.copytree(description, folder, dirs_exist_ok=True)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    config |= {"architectures": [manifest.architecture], "dtype": dtype_name(dtype)}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _write_tensors(folder: Path, layout: HubLayout, max_shard_size: int | str, read: Callable[[str], Tensor]) -> None:
    plan = plan_files(layout, max_shard_size)
    files = FileWriter(folder, layout, plan)
    with console.progress("export", max(1, plan.total_bytes), unit="MB") as advance:
        for group in layout.groups:
            made: Tensors = layout.convert({name: read(name) for name in group.stock})
            for name in group.hub:
                tensor = made.pop(name)
                files.write(name, tensor)
                advance(tensor.nbytes)
        files.close()
        copy_kept(folder, layout, plan, advance)
    write_index(folder, layout, plan)


def _read(
    source: Location,
    metadata: Metadata,
    tensors: dict[str, StockTensor],
    layout: HubLayout,
    averaged: Collection[str],
    name: str,
) -> Tensor:
    """Return a tensor of the stock model.

    Args:
        averaged: keys of averages, which are read in place of weights.
    """
    tensor = tensors[name]
    full = torch.empty(tensor.shape, dtype=layout.dtypes[name])
    views = {}
    for part, view in tensor.views(full).items():
        average = f"{AVERAGE_PREFIX}{part}"
        views[average if average in averaged else f"{MODEL_PREFIX}{part}"] = view
    read_tensors(source, metadata, views)
    return full
