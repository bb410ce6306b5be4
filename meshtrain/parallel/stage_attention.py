"""The attention and the masks of the stages of a process, under one name in transformers.

transformers calls both through its interfaces, by the name that a configuration has. The function
that computes attention is still the one of the model.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from meshtrain.compat.transformers import (
    attention_function,
    attention_implementation,
    attention_registered,
    mask_function_of,
    takes_masks,
)
from meshtrain.errors import ModelError
from meshtrain.parallel.context.parts import ContextParallel
from meshtrain.parallel.documents.attention import attend_by_segments
from meshtrain.parallel.documents.mask import SegmentedMask
from meshtrain.parallel.documents.segments import Document, Piece, Segment, find_documents, find_segments

OWNER = "stage_attention"
"""Attribute of the modules of a stage: what computes their attention."""

SHARES_CONFIGURATION = (
    "this model was built from the configuration of a parallel model, and would compute attention as that one does",
    "build it from the configuration that the parallel model had before the call of meshtrain.parallelize",
)


def why_attention_stays(model: PreTrainedModel) -> str | None:
    """Return why the attention of a model cannot be replaced by that of its stages; None if it can.

    Args:
        model: stock, on the meta device.
    """
    name = attention_implementation(model.config.get_text_config())
    if name is None or takes_masks(name):
        return None
    return f"attention by {name!r} takes no mask, which says what the tokens of a part or document see"


class StageAttention:
    """What the attention of the stages of a process does in place of the model's.

    Args:
        base: name of the attention of the model.
        context: what this process does with its part of the sequences; None without cp.
        by_documents: whether attention computes each document alone.
        pieces: the columns whose queries are computed, in order, if they are cut into pieces
            without cp.
    """

    def __init__(
        self,
        base: str,
        context: ContextParallel | None = None,
        *,
        by_documents: bool = False,
        pieces: Sequence[Piece] | None = None,
    ) -> None:
        self._base, self._context, self._by_documents, self._pieces = base, context, by_documents, pieces
        self._segments: list[Segment] | None = None
        self._documents: list[list[Document]] | None = None
        self._rows: Counter[nn.Module] = Counter()
        self._name = attention_registered(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "StageAttention":
        """Return itself: the hooks of a copied module set what attention of this name reads."""
        return self

    def watch(self, model: PreTrainedModel, base: str = "") -> None:
        """Make a stage compute attention like this.

        Args:
            model: of the stage. It gets a configuration of its own, because the name of the
                attention stands there, and other models may have been built from the same one.
            base: name of the module in it that gets the tokens.
        """
        _separate_configuration(model)
        model.set_attn_implementation(self._name)
        for it in model.modules():
            vars(it)[OWNER] = self
        module = model.get_submodule(base)
        module.register_forward_pre_hook(self._begin, with_kwargs=True)
        module.register_forward_hook(self._end, always_call=True)
        if self._context is not None and self._context.cuts_calls:
            module.register_forward_hook(self._context.share_router_logits)
        if self._context is not None:
            self._context.watch_blocks(model)

    @contextmanager
    def of(self, inputs: Mapping[str, Tensor]) -> Iterator[None]:
        """Know the documents of a batch in the forward passes inside the block.

        They are found once, so that the host waits for the device once, and not in each pass.

        Args:
            inputs: of the whole batch, whose microbatches every stage computes in order.
        """
        positions = inputs.get("position_ids")
        if self._by_documents and positions is not None and inputs.get("attention_mask") is None:
            self._documents = find_documents(positions)
        self._rows.clear()
        try:
            yield
        finally:
            self._documents = None

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Compute attention; transformers calls it by name.

        Raises:
            ModelError: for a module of another model, built from the configuration of this one.
        """
        is_stock = self._parts is None and not isinstance(attention_mask, SegmentedMask)
        if not is_stock and getattr(module, OWNER, None) is not self:
            raise ModelError(*SHARES_CONFIGURATION)
        if isinstance(attention_mask, SegmentedMask):
            return self._attend_by_segments(module, query, key, value, attention_mask, **kwargs)
        inner = attention_function(self._base, module)
        if self._parts is not None:
            return self._parts.attend(inner, module, query, key, value, attention_mask, **kwargs)
        output: tuple[Tensor, Any] = inner(module, query, key, value, attention_mask, **kwargs)
        return output

    # Outside of compiled graphs: the lengths of documents would make a graph for each batch.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attend_by_segments(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: SegmentedMask, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        inner = partial(attend_by_segments, attention_function(self._base, module))
        if self._parts is not None:
            return self._parts.attend(inner, module, query, key, value, mask, in_order=True, **kwargs)
        return inner(module, query, key, value, mask, **kwargs)

    def mask(self, **kwargs: Any) -> Any:
        """Make a mask; transformers calls it by name."""
        if self._segments is not None:
            return SegmentedMask(self._base, self._segments, **kwargs)
        return (mask_function_of(self._base) if self._parts is None else self._parts.mask)(**kwargs)

    @property
    def _parts(self) -> ContextParallel | None:
        """The parts of sequences, if the present forward pass computes some."""
        return self._context if self._context is not None and self._context.is_in_parts else None

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positions: Tensor | None = kwargs.get("position_ids")
        self._segments = None
        if self._by_documents and positions is not None and kwargs.get("attention_mask") is None:
            self._segments = find_segments(self._documents_of(model, positions), self._pieces_of(positions.shape[1]))
            # With a mask, transformers does not look for documents itself.
            mask = None if self._parts else torch.ones_like(positions, dtype=torch.bool)
            kwargs = {**kwargs, "attention_mask": mask}
        if self._context is not None and self._context.cuts_calls:
            # A class may pass the tokens by position.
            return (), self._context.begin(dict(zip(signature(model.forward).parameters, args, strict=False)) | kwargs)
        return args, kwargs if self._parts is None else self._parts.begin(kwargs)

    def _end(self, *_: Any) -> None:
        # Generation with a static cache makes masks before its next forward pass begins.
        self._segments = None

    def _documents_of(self, model: nn.Module, positions: Tensor) -> list[list[Document]]:
        if self._documents is None:
            return find_documents(positions)
        first = self._rows[model]
        self._rows[model] += len(positions)
        return self._documents[first : first + len(positions)]

    def _pieces_of(self, length: int) -> Sequence[Piece]:
        if self._parts is not None:
            return self._parts.pieces(length)
        return [(0, length)] if self._pieces is None else self._pieces


def _separate_configuration(model: PreTrainedModel) -> None:
    """Give a model and its modules a copy of the configuration that they share with others."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PretrainedConfig) and id(value) in copies:
                setattr(module, name, copies[id(value)])
