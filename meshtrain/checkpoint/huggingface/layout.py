"""How a model is stored in a Hugging Face folder, as stock `save_pretrained` writes it.

The layout is names, shapes and number formats. The hub may store a model in another form than its
modules: experts one by one, or other names. transformers converts modules to that form
(`revert_weight_conversion`), for a full model at once. Here the conversion runs group by group. A
group holds the tensors that are made of one another, and only one group is in memory at a time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    build_glob_alternation,
    rename_source_key,
    revert_weight_conversion,
)

from meshtrain.compat.transformers import kept_dtypes, never_saved, set_weight_conversions
from meshtrain.errors import CheckpointError, name_some
from meshtrain.models.weights.safetensors_files import FileTensor

FLOATS = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
MAX_SHARD_SIZE = "5GB"
WEIGHTS_PATTERN = "model{suffix}.safetensors"

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Group:
    """Tensors that are written together.

    Attributes:
        stock: names in the stock model.
        hub: names in the folder of the tensors that are made of them.
    """

    stock: tuple[str, ...]
    hub: tuple[str, ...]


@dataclass(frozen=True)
class HubLayout:
    """What a folder holds, and how it is made of the tensors of the stock model.

    Attributes:
        tensors: hub name -> tensor on meta, in the order of the files.
        dtypes: stock name -> number format in which it is written.
        groups: in the order of the files.
        convert: from the full tensors of a group, by stock name, to those of the folder.
        num_parameters: of the model, for the index. None: the index does not contain it.
        kept: hub name -> tensor of another folder that is copied byte by byte. It is in no group.
    """

    tensors: Tensors
    dtypes: dict[str, torch.dtype]
    groups: tuple[Group, ...]
    convert: Callable[[Tensors], Tensors]
    num_parameters: int | None = None
    kept: Mapping[str, FileTensor] = field(default_factory=dict)


def layout_of(model: PreTrainedModel, dtypes: Mapping[str, torch.dtype] | None = None) -> HubLayout:
    """Return how a stock model on meta is written in the number format that it was built in.

    Args:
        dtypes: stock name -> number format, of tensors that have another one.
    """
    stock = saved_tensors_of(model)
    stock |= {name: stock[name].to(dtype) for name, dtype in (dtypes or {}).items()}
    conversions = [
        entry
        for entry in get_model_conversion_mapping(model, add_legacy=False)
        # Prefix changes are for files of the bare model. transformers also leaves them out for a
        # model that was not loaded.
        if not isinstance(entry, PrefixChange)
    ]
    # The conversions are set once, instead of for every group.
    set_weight_conversions(model, conversions)
    convert = (lambda full: revert_weight_conversion(model, full)) if conversions else dict
    reverse = [entry.reverse_transform() for entry in reversed(conversions)]
    converters = [entry for entry in reverse if isinstance(entry, WeightConverter)]
    members: dict[str, list[str]] = {}
    for name in stock:
        target, pattern = rename_source_key(name, [], converters)
        members.setdefault(name if pattern is None else target, []).append(name)
    groups: list[Group] = []
    tensors: Tensors = {}
    for names in members.values():
        written = convert({name: stock[name] for name in names})
        groups.append(Group(tuple(names), tuple(written)))
        tensors |= {name: _alone(tensor) for name, tensor in written.items()}
    # transformers splits the tensors into files in the order of the full model.
    order = list(convert(stock))
    position = {name: index for index, name in enumerate(order)}
    groups.sort(key=lambda group: min(position[name] for name in group.hub))
    return HubLayout(
        {name: tensors[name] for name in order},
        {name: tensor.dtype for name, tensor in stock.items()},
        tuple(groups),
        convert,
        num_parameters=model.num_parameters(),
    )


def plain_layout(shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> HubLayout:
    """Return the layout of tensors that are written unchanged.

    Args:
        shapes: name -> shape and number format in which it is written.
    """
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
    dtypes = {name: dtype for name, (_, dtype) in shapes.items()}
    return HubLayout(tensors, dtypes, tuple(Group((name,), (name,)) for name in shapes), dict)


def saved_tensors_of(model: PreTrainedModel) -> Tensors:
    """Return what stock `save_pretrained` saves of a stock model on meta, before conversion.

    Persistent buffers are included, and a tied weight is included once. The number formats are
    those in which stock `from_pretrained` holds the model, which keeps some parameters in float32.
    """
    left_out = {*model.all_tied_weights_keys, *never_saved(model)}
    saved = {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}
    kept = kept_dtypes(model)
    if kept:
        pattern, names, _ = build_glob_alternation(list(kept))
        for name, tensor in saved.items():
            if (match := pattern.search(name)) is not None and match.lastgroup is not None:
                saved[name] = tensor.to(kept[names[match.lastgroup]])
    return saved


def check_names(where: object, found: Mapping[str, tuple[int, ...]], model: PreTrainedModel) -> None:
    """Check that tensors have the names and shapes of those of a stock model on meta.

    Args:
        where: what holds the tensors, for the message.
        found: stock name -> shape.

    Raises:
        CheckpointError: listing missing tensors, tensors that the model does not have, and other
            shapes.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in saved_tensors_of(model).items()}
    findings = {
        "lacks tensors of the model": [name for name in wanted if name not in found],
        "holds tensors that the model does not have": [name for name in found if name not in wanted],
        "has tensors of other shapes": [
            f"{name} {found[name]} instead of {shape}"
            for name, shape in wanted.items()
            if found.get(name, shape) != shape
        ],
    }
    problems = [f"{where} {what} ({len(names)}): {name_some(names)}" for what, names in findings.items() if names]
    if problems:
        raise CheckpointError(
            [*problems, f"weights and configuration of {type(model).__name__} do not belong together"]
        )


def stock_class_named(architecture: str) -> type[PreTrainedModel] | None:
    """Return a class of transformers, or None for a class that comes with its own code."""
    return getattr(transformers, architecture, None)


@dataclass(frozen=True)
class FilePlan:
    """Which file holds which tensors.

    Attributes:
        files: file name -> hub names of its tensors.
        file_of: hub name -> file name.
        total_bytes: of all tensors.
    """

    files: dict[str, list[str]]
    file_of: dict[str, str]
    total_bytes: int


def plan_files(layout: HubLayout, max_shard_size: int | str, pattern: str = WEIGHTS_PATTERN) -> FilePlan:
    """Split a layout into files, as stock `save_pretrained` does.

    Args:
        max_shard_size: of a file, in bytes or as in "5GB". A larger tensor has its own file.
        pattern: of the file names.

    Raises:
        CheckpointError: if `max_shard_size` is not a size.
    """
    try:
        split = split_torch_state_dict_into_shards(
            layout.tensors, filename_pattern=pattern, max_shard_size=max_shard_size
        )
    except ValueError as error:
        raise CheckpointError(
            f"max_shard_size = {max_shard_size!r} is not a size ({error})",
            "pass a number of bytes, or a string such as '5GB'",
        ) from error
    return FilePlan(dict(split.filename_to_tensors), dict(split.tensor_to_filename), split.metadata["total_size"])


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor on meta that is not a view, because the size of a file counts storages."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
