"""The part of a batch that a rank of cp computes, and the hooks that make a stage compute it."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from meshtrain.config.plan import ContextPlan
from meshtrain.parallel.context.attention import Attention, Masks, attend_by_heads
from meshtrain.parallel.context.blocks import compute_in_full
from meshtrain.parallel.context.collectives import gather_keys
from meshtrain.parallel.context.columns import Columns
from meshtrain.parallel.context.positions import tokens_before
from meshtrain.parallel.tensor.collectives import reduce_from_shards

OF_TOKENS = ("input_ids", "inputs_embeds", "token_type_ids")
"""Inputs of which a process gets the columns of its part. Masks and positions stay full."""


class ContextParallel:
    """What a process does with its part of the sequences of a batch.

    Args:
        group: the ranks of cp.
        plan: resolved.
        base: name of the attention of the model.
        full_blocks: names of the blocks that compute on full sequences.
        skips_padding: whether positions count the tokens without padding, if a batch has none.
        cuts_calls: whether every call of the base model gets full sequences, as in a program.

    Attributes:
        pads: (batch, seq) 0 for padding, of the present forward pass; None without a mask.
        columns: of all ranks.
    """

    def __init__(
        self,
        group: ProcessGroup,
        plan: ContextPlan,
        base: str,
        full_blocks: Iterable[str],
        *,
        skips_padding: bool,
        cuts_calls: bool = False,
    ) -> None:
        assert plan.method != "auto", "the plan is not resolved"
        assert plan.order != "auto", "the plan is not resolved"
        self._group = group
        self.columns = Columns(plan.order, group.size())
        self._masks = Masks(base, plan.method, self.columns, group.rank())
        self._by_heads = plan.method == "ulysses"
        self._full_blocks, self._skips_padding = frozenset(full_blocks), skips_padding
        self.pads: Tensor | None = None
        self._length: int | None = None
        self._cuts_calls = cuts_calls

    @contextmanager
    def of(self, inputs: dict[str, Tensor], labels: Tensor) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Compute a part of each sequence in the forward passes inside the block.

        Args:
            inputs: of the full sequences: `input_ids` (rows, seq), masks, positions.
            labels: (rows, seq)

        Yields:
            The inputs, with the tokens of this rank's part, and the labels of that part. Masks and
            positions stay those of the full sequences.
        """
        self._length = labels.shape[1]
        try:
            yield {**inputs, **self._of_tokens(inputs)}, self.own(labels)
        finally:
            self._length = None

    @contextmanager
    def in_full(self) -> Iterator[None]:
        """Compute full sequences on every rank in the forward passes inside the block."""
        kept = self._length, self._cuts_calls
        self._length, self._cuts_calls = None, False
        try:
            yield
        finally:
            self._length, self._cuts_calls = kept

    @property
    def is_in_parts(self) -> bool:
        """Whether the present forward pass computes a part of each sequence.

        In a program this holds until the next one, because a backward pass may recompute it.
        """
        return self._length is not None

    @property
    def cuts_calls(self) -> bool:
        """Whether the next call of the base model gets full sequences, and computes parts."""
        return self._cuts_calls

    def own(self, full: Tensor) -> Tensor:
        """Return the columns (rows, seq/cp, ...) of this process of (rows, seq, ...)."""
        return full[:, self._mine(full.shape[1], full.device)]

    def shared(self, part: Tensor) -> Tensor:
        """Join (rows, seq/cp, features) for a computation that is the same on every rank."""
        whole: Tensor = _Shared.apply(part, self)  # type: ignore[no-untyped-call]
        return whole

    def share_router_logits(self, base: nn.Module, args: object, output: Any) -> None:
        """Join those in the output of a base model: their loss is not a sum over tokens."""
        logits = getattr(output, "router_logits", None)
        if self._length is not None and logits:
            output.router_logits = tuple(map(self._shared_rows, logits))

    def summed(self, share: Tensor) -> Tensor:
        """Return the sum over cp, for a computation that is the same on every rank."""
        return reduce_from_shards(share, self._group)

    def watch_blocks(self, model: nn.Module) -> None:
        """Make the blocks of a stage compute on full sequences that need them."""
        for name, block in model.named_modules():
            if name in self._full_blocks:
                compute_in_full(block, self._join, self._own_columns)

    def pieces(self, length: int) -> list[tuple[int, int]]:
        """Return the pieces of a sequence whose queries this process computes in attention."""
        return [(0, length)] if self._by_heads else self.columns.pieces(self._group.rank(), length)

    def attend(
        self,
        inner: Attention,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        *,
        in_order: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Compute attention of the tokens of a part to full sequences.

        Args:
            inner: the attention of the model.
            module: of attention.
            query: (batch, heads, seq/cp, width)
            key: (batch, key heads, seq/cp, width)
            value: (batch, key heads, seq/cp, width)
            mask: as `inner` takes it.
            in_order: whether gathered keys are in the order of the sequence. They come one rank's
                after another otherwise, as the masks of `mask` have them.
            kwargs: further arguments of the attention.

        Returns:
            (batch, seq/cp, heads, width), and what else the function returns.
        """
        if self._by_heads:
            return attend_by_heads(inner, self._group, module, query, key, value, mask, **kwargs)
        key, value = gather_keys(key, self._group), gather_keys(value, self._group)
        if in_order:
            order = self.columns.joined(key.shape[2]).argsort().to(key.device)
            key, value = key.index_select(2, order), value.index_select(2, order)
        return inner(module, query, key, value, mask, **kwargs)

    def mask(self, **kwargs: Any) -> Any:
        """Return the mask of a part, as the attention of the model takes it."""
        return self._masks(**kwargs)

    def own_pads(self) -> Tensor | None:
        """Return (batch, seq/cp) 0 for padding, of this process's part; None without a mask."""
        if self.pads is None or self._length is None:
            return self.pads
        return self.pads[:, self._mine(self._length, self.pads.device)]

    def full_rows(self, values: Tensor) -> Tensor:
        """Join (rows * seq/cp, features) of all ranks to (rows * seq, features), in order."""
        if self._length is None:
            return values
        return self.joined(values.unflatten(0, (-1, self._length // self._group.size()))).flatten(0, 1)

    def joined(self, part: Tensor) -> Tensor:
        """Join (rows, seq/cp, features) of all ranks to (rows, seq, features), in order."""
        whole = gather_keys(part.unsqueeze(1), self._group).squeeze(1)
        return whole[:, self.columns.joined(whole.shape[1]).argsort().to(part.device)]

    def _shared_rows(self, logits: Tensor) -> Tensor:
        assert self._length is not None, "the sequences are not in parts"
        rows = logits.view(-1, self._length // self._group.size(), logits.shape[-1])
        return self.shared(rows).view(*logits.shape[:-2], -1, logits.shape[-1])

    def _join(self, part: Tensor) -> Tensor:
        return part if self._length is None else self.joined(part)

    def _own_columns(self, length: int) -> Tensor | None:
        return None if self._length is None else self.columns.of(self._group.rank(), length)

    def _mine(self, length: int, device: torch.device) -> Tensor:
        return self.columns.of(self._group.rank(), length).to(device)

    def begin(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of a stage for the part of this process.

        Args:
            kwargs: with masks and positions of full sequences.
        """
        if self._cuts_calls:
            kwargs = self._cut(kwargs)
        assert self._length is not None, "the sequences are not in parts"
        ids = _tokens_of(kwargs)
        shape = (ids.shape[0], self._length)
        positions, pads = kwargs.get("position_ids"), kwargs.get("attention_mask")
        self.pads = pads
        if positions is None and pads is not None and self._skips_padding:
            positions = tokens_before(pads)
        elif positions is None:
            positions = torch.arange(self._length, device=ids.device).expand(shape)
        # transformers takes the number of keys from a mask, and with one it does not look for
        # documents in the positions, which are those of a part.
        mask = torch.ones(shape, dtype=torch.bool, device=ids.device)
        if pads is not None:
            # Blocks other than attention get its last columns, of as many tokens as the input has.
            mask = pads[:, self.columns.joined(self._length, last=self._group.rank()).to(ids.device)]
        # Like transformers, which looks for documents only without a mask.
        self._masks.begin(
            kwargs.get("position_ids") if pads is None else None,
            None if pads is None else pads.bool(),
            mask.bool(),
            has_types=kwargs.get("token_type_ids") is not None,
        )
        mine = self._mine(self._length, ids.device)
        return {**kwargs, "position_ids": positions[..., mine], "attention_mask": mask}

    def _cut(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Begin a pass, and return its inputs with the tokens of this process alone."""
        full = _tokens_of(kwargs)
        self._length = full.shape[1]
        positions = kwargs.get("position_ids")
        if positions is not None:
            # One row may stand for all.
            kwargs = {**kwargs, "position_ids": positions.expand(full.shape[0], -1)}
        return {**kwargs, **self._of_tokens(kwargs)}

    def _of_tokens(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the inputs of tokens, of this process's part."""
        return {name: self.own(inputs[name]) for name in OF_TOKENS if inputs.get(name) is not None}


def _tokens_of(kwargs: dict[str, Any]) -> Tensor:
    """Return (rows, seq, ...) token ids or embeddings."""
    tokens: Tensor = kwargs["inputs_embeds"] if kwargs.get("input_ids") is None else kwargs["input_ids"]
    return tokens


class _Shared(torch.autograd.Function):
    """The parts of all ranks; their gradient is the same on every rank, which keeps its part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        return context.joined(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.context.own(gradient), None
