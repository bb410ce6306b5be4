"""Saving a parallel model: as an ordinary Hugging Face folder, or with one file per rank."""

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from meshtrain.api.arguments import check_tokenizer, new_folder, resolve_dtype
from meshtrain.api.handle import Handle, handle_of
from meshtrain.checkpoint.huggingface.adapters import save_adapters
from meshtrain.checkpoint.huggingface.description import Tokenizer
from meshtrain.checkpoint.huggingface.layout import MAX_SHARD_SIZE
from meshtrain.checkpoint.huggingface.pretrained import write_pretrained
from meshtrain.checkpoint.parallelized import write_parallelized
from meshtrain.config.arguments import check_flag, described, whole_number
from meshtrain.config.problems import did_you_mean
from meshtrain.errors import CheckpointError, ModelError
from meshtrain.models.adapters import is_adapter_parameter

# Keywords of stock `save_pretrained` (transformers and peft): keyword -> the values with which it
# has no effect here (None: any), and what is written instead.
STOCK_KEYWORDS: Mapping[str, tuple[tuple[object, ...] | None, str]] = {
    "is_main_process": (None, ""),
    "token": (None, ""),
    "safe_serialization": ((True, None), "safetensors only; leave it out"),
    "state_dict": ((None,), "the values that it has; leave it out"),
    "push_to_hub": ((False, None), "a folder; upload that afterwards, with huggingface_hub.upload_folder"),
    "variant": ((None, ""), "files with their usual names; leave it out, and rename them"),
    "save_embedding_layers": (("auto", False), "adapters alone; leave it out"),
    "save_peft_format": ((True, None), "adapters as peft does; leave it out"),
    "save_original_format": ((True, None), "the layout of the hub; leave it out"),
    "distributed_checkpoint": ((False, None), "that with meshtrain.save_parallelized(model, folder)"),
}


def save_pretrained(
    model: Any,
    folder: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    tokenizer: Tokenizer = None,
    merge_adapters: bool = False,
) -> None:
    """Write a parallel model as a Hugging Face folder, bit for bit. Collective.

    Stock `from_pretrained` loads the folder. It is the one that stock `save_pretrained` would
    write, whatever the mesh: safetensors in the layout of the hub, an index if there are several
    files, config.json, generation_config.json and the tokenizer. (Only the shards of a model with
    experts may be split between other tensors.) It appears when it is complete. Tensors are
    gathered one by one, on the rank that writes them. The first rank of every pipeline stage needs
    host memory for the largest tensor. Experts need twice that, because the hub stores them
    separately. The other ranks need memory for their own part of one tensor.

    Of a model with LoRA adapters only these are written, as peft writes them:
    `PeftModel.from_pretrained` loads them.

    Args:
        model: what `parallelize` returned.
        folder: must not exist, or be empty; every machine must see the same one.
        dtype: number format of the weights, such as `torch.bfloat16`, or its name; None: the
            original one, in which `parallelize` received the values, or `model.config.dtype` of a
            model from meta; not that in which the plan trains. Tensors that transformers always
            keeps in float32 stay float32.
        max_shard_size: of a file, in bytes or as in "5GB"; a larger tensor has a file of its own.
        tokenizer: a tokenizer, or a directory that holds one; None: the one in the directory that
            the model was loaded from, if there is one.
        merge_adapters: write the complete model, with its active LoRA adapters added to the weights
            as peft adds them.

    Raises:
        ModelError: if the model is not parallel, has no values yet, has no adapters to merge, or
            trains something beside adapters that would not be saved with them.
        CheckpointError: on all ranks alike: the folder is not empty, cannot be written or is not
            the same on all machines, there is no tokenizer where one should be, or tensors are
            missing or do not belong to the model; those are listed.

    Source: the layout of the hub, transformers.core_model_loading.revert_weight_conversion.
    """
    handle, call = _ready(model), "save_pretrained"
    folder = new_folder(f"{call}: folder", folder)
    dtype = None if dtype is None else resolve_dtype(f"{call}: dtype", dtype, CheckpointError)
    check_tokenizer(f"{call}: tokenizer", tokenizer)
    check_flag(f"{call}: merge_adapters", merge_adapters)
    if not isinstance(max_shard_size, str):
        whole_number(f"{call}: max_shard_size", max_shard_size, CheckpointError, least=1, wanted="'5GB', or bytes")
    if _saves_adapters(handle, dtype, merge_adapters=merge_adapters):
        save_adapters(handle.adapted, handle.pipeline, folder, tokenizer=tokenizer)
        return
    write_pretrained(
        handle.pipeline,
        folder,
        dtype=dtype,
        max_shard_size=max_shard_size,
        tokenizer=tokenizer,
        origin=source_of(handle),
    )


def _saves_adapters(handle: Handle, dtype: torch.dtype | None, *, merge_adapters: bool) -> bool:
    """Return whether only the adapters of a model are written.

    Raises:
        ModelError: for options that do not fit the model.
    """
    if not _has_adapters(handle):
        if merge_adapters:
            raise ModelError("merge_adapters = True, but the model has no LoRA adapters", "leave it out")
        return False
    if dtype is not None and not merge_adapters:
        raise ModelError("dtype is for a full model, but adapters keep theirs", "leave it out, or merge_adapters=True")
    return not merge_adapters


def save_parallelized(model: Any, folder: str | Path, *, tokenizer: Tokenizer = None) -> None:
    """Write the weights of a parallel model as they are stored, one file per rank. Collective.

    Nothing is gathered. `load_weights(model, folder)` loads them again on any mesh; `meshtrain
    merge FOLDER OUT` makes an ordinary model of them, on one process without an accelerator;
    `meshtrain checkpoint verify FOLDER` compares every file with its hash. Copies of the model over
    dp are written once.

    Args:
        model: what `parallelize` returned.
        folder: must not exist, or be empty; appears when it is complete. Every machine must see the
            same one.
        tokenizer: a tokenizer, or a directory that holds one; None: the one in the directory that
            the model was loaded from, if there is one.

    Raises:
        ModelError: if the model is not parallel, or has no values yet.
        CheckpointError: on all ranks alike: the folder is not empty or cannot be written.

    Source: OSLO's `save_parallelized`; the files are those of torch.distributed.checkpoint.
    """
    handle = _ready(model)
    folder = new_folder("save_parallelized: folder", folder)
    check_tokenizer("save_parallelized: tokenizer", tokenizer)
    if _has_adapters(handle):
        raise ModelError(
            "a model with LoRA adapters cannot be written rank by rank",
            "use meshtrain.save_pretrained(model, folder), with merge_adapters=True for the full model, or "
            "meshtrain.save_checkpoint",
        )
    write_parallelized(handle.pipeline, folder, tokenizer=tokenizer, origin=source_of(handle))


def without_stock_keywords(given: Mapping[str, Any], own: Collection[str] = ()) -> dict[str, Any]:
    """Return keywords without those of stock `save_pretrained` that have no effect here.

    Args:
        given: keywords as a program for one process passes them.
        own: names that are accepted as well; empty: those of `save_pretrained`.

    Raises:
        CheckpointError: for a keyword that would have an effect, and for an unknown one.
    """
    parameters = inspect.signature(save_pretrained).parameters.values()
    own = own or [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for name, value in given.items():
        if name in STOCK_KEYWORDS:
            _check_stock_keyword(name, value)
        elif name not in own:
            raise CheckpointError(f"save_pretrained: unknown keyword {name!r}", did_you_mean(name, [*own], "it takes"))
    return {name: value for name, value in given.items() if name not in STOCK_KEYWORDS}


def _check_stock_keyword(name: str, value: object) -> None:
    values, instead = STOCK_KEYWORDS[name]
    # The type is compared too: 0 and 1 are not flags, and tensors in a dict cannot be compared.
    if values is not None and not any(type(value) is type(one) and value == one for one in values):
        raise CheckpointError(f"save_pretrained: {name} is {described(value)}, and a parallel model writes {instead}")


def source_of(handle: Handle) -> Path | None:
    """Return the directory that a model came from, which may hold its tokenizer."""
    return None if handle.source is None else Path(handle.source)


def _has_adapters(handle: Handle) -> bool:
    return any(map(is_adapter_parameter, handle.pipeline.parameter_names))


def _ready(model: Any) -> Handle:
    handle = handle_of(model)
    handle.check_values()
    return handle
