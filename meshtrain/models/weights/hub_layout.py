"""Map the tensors of a Hugging Face directory to a stock model's state, by transformers' table.

The files of a model may have the layout of its modules or an older one, in which experts are stored
one by one, projections are fused, or names differ. Here transformers' conversion of the tensors
runs on tensors without values.
"""

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from meshtrain.compat.transformers import ignored_when_loaded
from meshtrain.errors import name_some
from meshtrain.models.weights.block_reader import BlockReader
from meshtrain.models.weights.lazy_tensor import LazyTensor, NotRecordedError, lazy_tensor_in_file
from meshtrain.models.weights.operations import Ranges
from meshtrain.models.weights.safetensors_files import FileTensor

T = TypeVar("T", bound=Tensor)
# Old files hold buffers that the model computes itself: causal masks, positions and rotary
# frequencies.
_COMPUTED = re.compile(r"(^|\.)((attn|attention)\.(bias|masked_bias)|rotary_emb\.inv_freq|position_ids)$")
# Errors that the operations of transformers raise for tensors that do not fit.
_MISFITS = (ValueError, RuntimeError, IndexError, KeyError, AttributeError)


@dataclass
class Layout:
    """Where the state of a stock model is in files.

    Attributes:
        tensors: name in the stock model's state -> lazy tensor that reads its values.
        missing: names of missing tensors, as these files would have them.
        unexpected: names of tensors in the files that the model does not have.
        misfits: messages of the conversion about tensors that do not fit together.
        contested: copy -> original of the ties for which the files have both ends.
        is_converted: whether the layout of the files differs from that of the modules.
        sources: name in the stock model's state -> names in the files that it is made of.
        converted: those names in the state whose tensors are not stored as they are in the model.
    """

    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    contested: dict[str, str] = field(default_factory=dict)
    is_converted: bool = False
    sources: dict[str, list[str]] = field(default_factory=dict)
    converted: set[str] = field(default_factory=set)


@dataclass
class _Group:
    """The tensors of the files that become one or several tensors of the model."""

    converter: WeightConverter | None
    sources: dict[str, list[FileTensor]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [tensor.name for tensors in self.sources.values() for tensor in tensors]


def find_layout(stock: PreTrainedModel, tensors: Mapping[str, FileTensor]) -> Layout:
    """Find every tensor of a model's state in the files, in any layout that transformers reads.

    Args:
        stock: the full, unchanged model on meta.
        tensors: of the files, by name.
    """
    state: dict[str, Tensor] = stock.state_dict()
    layout = Layout()
    groups = _collect(stock, state, tensors, layout)
    in_work = _LatestResult()
    for first, group in groups.items():
        if group.converter is None:
            (tensor,) = (tensor for found in group.sources.values() for tensor in found)
            layout.tensors[first], layout.sources[first] = lazy_tensor_in_file(tensor), group.names
            continue
        try:
            outputs = _convert(stock, first, group, in_work)
        except _MISFITS as error:
            if not _note_incomplete(stock, first, state, group, layout):
                reason = " ".join(str(error).split())
                layout.misfits.append(f"{first} cannot be built from {name_some(group.names, 3)}: {reason}")
            continue
        for name, output in outputs.items():
            layout.sources[name] = group.names
            layout.converted.add(name)
            if name not in state:
                layout.unexpected += group.names
            elif output.shape == state[name].shape or not _note_incomplete(stock, name, state, group, layout):
                layout.tensors[name] = output
    _tie(layout, stock.all_tied_weights_keys)
    _note_missing(stock, state, groups, layout)
    return layout


def _collect(
    stock: PreTrainedModel, state: dict[str, Tensor], tensors: Mapping[str, FileTensor], layout: Layout
) -> dict[str, _Group]:
    """Group the tensors that belong together, in the order that transformers uses.

    Names that do not belong to the model or to a group are added to `layout.unexpected`.
    """
    transforms = get_model_conversion_mapping(stock)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, groups = stock.base_model_prefix, dict[str, _Group]()
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        if target not in state:
            if not _is_ignored(stock, name, target):
                layout.unexpected.append(name)
            continue
        layout.is_converted |= target not in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
        converter = None if pattern is None else by_pattern[pattern]
        group = groups.setdefault(target, _Group(deepcopy(converter)))
        if (group.converter is None) != (converter is None) or (converter is None and group.sources):
            layout.unexpected.append(name)
        else:
            group.sources.setdefault(pattern or name, []).append(tensors[name])
    return groups


def _is_ignored(stock: PreTrainedModel, *names: str) -> bool:
    patterns = ignored_when_loaded(stock)
    return any(
        _COMPUTED.search(name) is not None or any(re.search(pattern, name) for pattern in patterns) for name in names
    )


def _convert(stock: PreTrainedModel, first: str, group: _Group, in_work: "_LatestResult") -> dict[str, LazyTensor]:
    """Run the conversion of a group on lazy tensors.

    If it does more than move values, it runs on the tensors of the group when they are read.
    """
    try:
        return _run(stock, first, group, lazy_tensor_in_file)
    except NotRecordedError:
        shapes = _run(stock, first, group, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
    work = _Work(stock, first, group, in_work)
    return {name: LazyTensor(_ConvertedTensor(work, name), value.shape, value.dtype) for name, value in shapes.items()}


def _run(stock: PreTrainedModel, first: str, group: _Group, load: Callable[[FileTensor], T]) -> dict[str, T]:
    # A converter keeps the tensors that it gets until it runs, so each run needs its own copy.
    converter = deepcopy(group.converter)
    assert converter is not None
    for pattern, tensors in group.sources.items():
        for tensor in tensors:
            converter.add_tensor(first, tensor.name, pattern, load(tensor))  # type: ignore[arg-type]
    values = converter.convert(first, model=stock, config=stock.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in values.items()}


class _LatestResult:
    """The result of the latest conversion; all results would be a second model in memory."""

    def __init__(self) -> None:
        self.work: _Work | None = None
        self.values: dict[str, Tensor] = {}


class _Work:
    """A conversion that needs the values of its full group."""

    def __init__(self, stock: PreTrainedModel, first: str, group: _Group, in_work: _LatestResult) -> None:
        self._stock, self._first, self._group, self._in_work = stock, first, group, in_work
        self._dtype = stock.state_dict()[first].dtype

    def values(self, reader: BlockReader) -> dict[str, Tensor]:
        if self._in_work.work is not self:
            self._in_work.work, self._in_work.values = None, {}
            self._in_work.values = _run(
                self._stock, self._first, self._group, lambda tensor: self._load(tensor, reader)
            )
            self._in_work.work = self
        return self._in_work.values

    def _load(self, tensor: FileTensor, reader: BlockReader) -> Tensor:
        # transformers also computes in the type of the model, not in that of the file.
        value = torch.empty(tensor.shape, dtype=self._dtype)
        reader.read(tensor, [slice(0, length) for length in tensor.shape], value)
        return value


class _ConvertedTensor:
    def __init__(self, work: _Work, name: str) -> None:
        self._work, self._name = work, name

    def read(self, ranges: Ranges, out: Tensor, reader: BlockReader) -> None:
        out.copy_(self._work.values(reader)[self._name][tuple(ranges)])


def _note_incomplete(
    stock: PreTrainedModel, name: str, state: dict[str, Tensor], group: _Group, layout: Layout
) -> bool:
    """Record the tensors that are missing from a group, or that do not belong to it.

    For example, one of eight experts may be missing.

    Returns:
        Whether there are such tensors.
    """
    expected = _hub_names(stock, name, state)
    missing, unexpected = expected - {*group.names}, {*group.names} - expected
    layout.missing += sorted(missing, key=dot_natural_key)
    layout.unexpected += sorted(unexpected, key=dot_natural_key)
    return bool(missing or unexpected)


def _hub_names(stock: PreTrainedModel, name: str, state: dict[str, Tensor]) -> set[str]:
    try:
        return {*revert_weight_conversion(stock, {name: state[name]})}
    except _MISFITS:
        # Not every conversion can be reverted (NotImplementedError is a RuntimeError). In that case
        # the name in the model is used.
        return {name}


def _tie(layout: Layout, ties: Mapping[str, str]) -> None:
    """Set the ends of a tie that the files lack to the values of another end, like transformers."""
    tensors = layout.tensors
    layout.contested = {copy: source for copy, source in ties.items() if {copy, source} <= tensors.keys()}
    for copy, source in ties.items():
        if copy in tensors:
            tensors.setdefault(source, tensors[copy])
    for copy, source in ties.items():
        if source in tensors:
            tensors.setdefault(copy, tensors[source])


def _note_missing(
    stock: PreTrainedModel, state: dict[str, Tensor], groups: Mapping[str, _Group], layout: Layout
) -> None:
    """Record the parameters for which the files have no tensor.

    Those for which the files have a part of the tensors were recorded before.
    """
    there = {name for group in groups.values() for name in group.names}
    # Missing buffers keep the values that the model computes. transformers also treats them as
    # optional.
    for name, _ in stock.named_parameters():
        if name not in layout.tensors:
            names = _hub_names(stock, name, state) if layout.is_converted else {name}
            if not names & there:
                layout.missing += sorted(names, key=dot_natural_key)
