"""From a checkpoint to an ordinary Hugging Face model: one CPU process, one shard in memory at a time."""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from meshtrain import console
from meshtrain.checkpoint.directory import HUGGINGFACE_NAME, Manifest, find_checkpoint, read_manifest, sync_tree
from meshtrain.checkpoint.integrity import find_damage
from meshtrain.checkpoint.location import Location, as_local
from meshtrain.checkpoint.reading import read_metadata, read_tensors, tensor_entries
from meshtrain.checkpoint.store import MODEL_PREFIX
from meshtrain.errors import CheckpointError, name_some
from meshtrain.models.safetensors_files import INDEX_NAME, SINGLE_NAME


@dataclass(frozen=True)
class StockTensor:
    """A tensor of the stock model.

    Attributes:
        name: its FQN.
        keys: the names in the checkpoint of the parts that make it up, in order.
        dim: along which they are joined.
        sizes: of the parts along `dim`.
        shape: of the whole.
        kept_as: shape in the checkpoint, where it is another: a stack of parts.
        dtype: in which it is exported.
    """

    name: str
    keys: tuple[str, ...]
    dim: int
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    kept_as: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def export_checkpoint(checkpoint: Location, folder: Path, *, max_shard_bytes: int = 2**30) -> None:
    """Write a checkpoint's weights, configuration and tokenizer as a Hugging Face model.

    Args:
        checkpoint: a step-N directory; or a run directory, whose newest checkpoint is taken.
        folder: where the model goes; appears when it is complete.
        max_shard_bytes: size of a safetensors file; a larger tensor has a file of its own. Peak memory is one file
            and the largest tensor.

    Raises:
        CheckpointError: if there is no whole checkpoint, the folder has something in it, or the disk is full.
    """
    source, folder = find_checkpoint(checkpoint), folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not empty; export into a new folder")
    if source != checkpoint:
        console.line(f"{source} is the newest checkpoint")
    if damage := find_damage(source):
        raise CheckpointError(f"{problem}; use another checkpoint" for problem in damage)
    manifest, metadata = read_manifest(source), read_metadata(source)
    if f"{HUGGINGFACE_NAME}/config.json" not in manifest.files:
        raise CheckpointError(f"{source} has no {HUGGINGFACE_NAME}/config.json; put the model's configuration there")
    shards = _split_into_shards(list_stock_tensors(source, metadata, manifest), max_shard_bytes)
    draft = folder.with_name(f".{folder.name}.exporting")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _copy_huggingface(source, draft, manifest)
        _write_shards(source, metadata, shards, draft)
        sync_tree(draft)
        draft.rename(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write {folder}: {reason}; make room or export elsewhere") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    console.line(f"{folder} holds {manifest.architecture} of step {manifest.step}")


def list_stock_tensors(source: Location, metadata: Metadata, manifest: Manifest) -> list[StockTensor]:
    """Return the tensors of the stock model in an order that does not depend on the mesh that saved them.

    Raises:
        CheckpointError: if the checkpoint does not hold what its manifest names.
    """
    saved = {
        key.removeprefix(MODEL_PREFIX): tuple(entry.size)
        for key, entry in tensor_entries(metadata, MODEL_PREFIX).items()
    }
    parts = {entry.name: (entry.parts, entry.dim) for entry in manifest.fused}
    stacked = {entry.name for entry in manifest.fused if entry.stacked}
    in_parts = {part for names, _ in parts.values() for part in names}
    if absent := sorted(in_parts - saved.keys()):
        raise CheckpointError(
            f"{source} lacks parts that its manifest names: {name_some(absent)}; use another checkpoint"
        )
    parts |= {name: ((name,), 0) for name in saved if name not in in_parts and name not in manifest.tied}
    tensors = []
    for name in sorted(parts, key=_natural):
        names, dim = parts[name]
        sizes: tuple[int, ...] = ()
        shape = saved[names[0]]
        if len(names) > 1:
            sizes = tuple(saved[part][dim] for part in names)
            shape = (*shape[:dim], sum(sizes), *shape[dim + 1 :])
        kept_as = shape if name in stacked else ()
        if kept_as:
            shape = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
        dtype = getattr(torch, manifest.dtypes.get(name, manifest.dtype))
        keys = tuple(f"{MODEL_PREFIX}{part}" for part in names)
        tensors.append(StockTensor(name, keys, dim, sizes, shape, dtype, kept_as))
    return tensors


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [(not word.isdigit(), int(word) if word.isdigit() else 0, word) for word in re.split(r"\.", name)]


def _split_into_shards(tensors: Sequence[StockTensor], max_shard_bytes: int) -> list[list[StockTensor]]:
    shards: list[list[StockTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards


def _copy_huggingface(source: Location, draft: Path, manifest: Manifest) -> None:
    with as_local(source / HUGGINGFACE_NAME) as directory:
        shutil.copytree(directory, draft)
    path = draft / "config.json"
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    config |= {"architectures": [manifest.architecture], "dtype": manifest.dtype}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _write_shards(source: Location, metadata: Metadata, shards: Sequence[Sequence[StockTensor]], draft: Path) -> None:
    weight_map: dict[str, str] = {}
    total_bytes = sum(tensor.num_bytes for shard in shards for tensor in shard)
    with console.progress("export", total_bytes, unit="MB") as advance:
        for number, shard in enumerate(shards, start=1):
            name = SINGLE_NAME if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            tensors: dict[str, Tensor] = {}
            for tensor in shard:
                tensors[tensor.name] = _read_stock_tensor(source, metadata, tensor)
                advance(tensor.num_bytes)
            save_file(tensors, draft / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (draft / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _read_stock_tensor(source: Location, metadata: Metadata, tensor: StockTensor) -> Tensor:
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    parts = (
        torch.split(whole, list(tensor.sizes), tensor.dim)
        if tensor.sizes
        else [whole.view(tensor.kept_as or tensor.shape)]
    )
    read_tensors(source, metadata, dict(zip(tensor.keys, parts, strict=True)))
    return whole
