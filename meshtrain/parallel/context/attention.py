"""Attention of tokens in parts to the full sequence, and the masks that it needs.

transformers calls both through its interfaces, by the name that a configuration has. The function
that computes attention is still the one of the model.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshtrain.compat.nn import parameter_table
from meshtrain.compat.transformers import mask_function_of
from meshtrain.config.plan import ContextMethod
from meshtrain.errors import DataError
from meshtrain.parallel.context.collectives import to_heads, to_parts
from meshtrain.parallel.context.columns import Columns

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""Maps the indices of batch, head, query and key to whether the query sees the key."""

Attention = Callable[..., tuple[Tensor, Any]]
"""The function of a model: (module, query, key, value, mask, **others) -> output, others."""

_TENSORS = ("s_aux", "position_ids")
"""Tensors besides queries, keys, values and a mask that the attention of a model may get."""


def further_tensors(kwargs: Mapping[str, Any]) -> set[str]:
    """Return the names of tensors that only the attention of one class reads."""
    return {name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in _TENSORS}


def attend_by_heads(
    inner: Attention,
    group: ProcessGroup,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Compute attention for this rank's share of the heads, on the full sequence.

    Args:
        inner: the attention of the model.
        group: the ranks of cp, whose number divides the number of heads.
        module: of attention.
        query: (batch, heads, seq/cp, width)
        key: (batch, key heads, seq/cp, width)
        value: (batch, key heads, seq/cp, width)
        mask: of the full sequence.
        kwargs: further arguments of the attention.

    Returns:
        (batch, seq/cp, heads, width), and what else the function returns.
    """
    heads = query.shape[1]
    copies = num_exchanged_keys(heads, key.shape[1], group.size()) // key.shape[1]
    if copies > 1:
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    with _share_of_heads(module, heads, key.shape[1], group):
        if "s_aux" in kwargs:
            kwargs["s_aux"] = _share(kwargs["s_aux"], heads, group)
        exchanged = (to_heads(tensor, group) for tensor in (query, key, value))
        output, *rest = inner(module, *exchanged, mask, **kwargs)
    return to_parts(output.transpose(1, 2), group).transpose(1, 2).contiguous(), *rest


def num_exchanged_keys(heads: int, keys: int, size: int) -> int:
    """Return how many heads of keys are exchanged, so that each rank has those of its queries.

    Args:
        heads: of the queries.
        keys: number of heads of the keys.
        size: number of ranks.
    """
    if keys % size == 0:
        return keys
    return size if size % keys == 0 else heads


@contextmanager
def _share_of_heads(module: Any, heads: int, keys: int, group: ProcessGroup) -> Iterator[None]:
    """Let a module have this rank's part of what belongs to single heads, inside the block.

    Args:
        module: of attention. It may own one value for each head, such as the sinks of GPT-OSS.
        heads: of the queries of all ranks.
        keys: number of heads of the keys of all ranks.
        group: the ranks of cp.
    """
    parameters = parameter_table(module)
    own = dict(parameters)
    groups = getattr(module, "num_key_value_groups", None)
    try:
        parameters.update({name: _share(value, heads, group) for name, value in own.items()})
        if groups is not None:
            module.num_key_value_groups = heads // keys
        yield
    finally:
        parameters.update(own)
        if groups is not None:
            module.num_key_value_groups = groups


def _share(value: Any, heads: int, group: ProcessGroup) -> Any:
    has_heads = isinstance(value, Tensor) and value.shape[:1] == (heads,)
    return value.chunk(group.size())[group.rank()] if has_heads else value


class Masks:
    """Makes the masks of a forward pass, of which transformers knows a part of the queries.

    Args:
        base: name of the attention of the model.
        method: of context parallelism.
        columns: of all ranks.
        rank: of this process.
    """

    def __init__(self, base: str, method: ContextMethod, columns: Columns, rank: int) -> None:
        self._base, self._method = base, method
        self._columns, self._rank = columns, rank
        self._pads: Tensor | None = None
        self._shift: Tensor | None = None
        self._documents: tuple[Tensor, Tensor] | None = None
        self._has_types = False

    def begin(self, positions: Tensor | None, pads: Tensor | None, given: Tensor, *, has_types: bool) -> None:
        """Note what the masks of the next forward pass depend on.

        Args:
            positions: (batch, seq) of the full sequence; None if they count from its start. Each
                document begins where they do not go on by one.
            pads: (batch, seq) False for padding; None without any.
            given: (batch, seq) the mask that the class gets, with columns in another order.
            has_types: whether the class also gets types of tokens.
        """
        self._pads, self._has_types = pads, has_types
        self._shift = None if pads is None else _pads_before(given) - _pads_before(pads)
        self._documents = None
        if positions is not None:
            number = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)
            # Like transformers, which counts columns where no row has a second document.
            columns = torch.arange(positions.shape[1], device=positions.device)
            self._documents = torch.where((number[:, -1] > 0).any(), positions, columns), number

    def __call__(
        self, *, mask_function: MaskFunction, kv_length: int, local_size: int | None = None, **kwargs: Any
    ) -> Any:
        """Return a mask for the queries that this rank computes, as the model's attention takes it.

        Args:
            mask_function: of the full sequence.
            kv_length: length of the full sequence.
            local_size: of the windows or chunks; None without.
            kwargs: further arguments of the function for masks.

        Raises:
            DataError: for a mask that is made of the types of tokens, of which a class has only
                those of a part.
        """
        if self._has_types and _reads_tensors(mask_function):
            raise DataError(
                "token_type_ids cannot be divided over cp, because the model makes its mask of them",
                "leave them out, or use a mesh with cp = 1",
            )
        # Only chunks count padding, and only they and windows have a size.
        whole = self._inside_documents(mask_function if local_size is None else self._of_columns(mask_function))
        kwargs |= {"kv_length": kv_length} | ({} if local_size is None else {"local_size": local_size})
        if self._documents is not None:
            kwargs["allow_is_causal_skip"] = False
        if self._method == "ulysses":
            kwargs |= {"mask_function": whole, "q_length": kv_length, "attention_mask": self._pads}
        else:
            kwargs |= self._of_part(whole, kv_length, kwargs.get("device", "cpu"))
            if kwargs.get("allow_is_bidirectional_skip"):
                # Attention that sees all tokens still needs a mask for padding.
                kwargs["allow_is_bidirectional_skip"] = self._pads is None
        return mask_function_of(self._base)(**kwargs)

    def _of_columns(self, mask_function: MaskFunction) -> MaskFunction:
        """Return a function that knows how much padding a row begins with, where chunks begin.

        The class counts it in the order of columns that it got.
        """
        if self._shift is None:
            return mask_function
        shift = self._shift
        return lambda b, h, q, k: mask_function(b, h, q + shift[b], k + shift[b])

    def _inside_documents(self, mask_function: MaskFunction) -> MaskFunction:
        if self._documents is None:
            return mask_function
        positions, number = self._documents

        def inside(b: Any, h: Any, q: Any, k: Any) -> Any:
            return mask_function(b, h, positions[b, q], positions[b, k]) & (number[b, q] == number[b, k])

        return inside

    def _of_part(self, whole: MaskFunction, length: int, device: Any) -> dict[str, Any]:
        mine = self._columns.of(self._rank, length).to(device)
        joined = self._columns.joined(length).to(device)
        pads = self._pads

        def part(b: Any, h: Any, q: Any, k: Any) -> Any:
            k = joined[k]
            sees = whole(b, h, mine[q], k)
            return sees if pads is None else sees & pads[b, k]

        return {
            "mask_function": part,
            "q_length": len(mine),
            "attention_mask": None,
            # The rule of a part is not that of the first queries and keys.
            "allow_is_causal_skip": False,
        }


def _reads_tensors(function: Any) -> bool:
    """Return whether a mask function has tensors with one number for each token.

    It closes over them, or the functions that it combines do. Chunks have (batch,) padding.
    """
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    held = [it for cell in cells for it in (cell if isinstance(cell, tuple | list) else (cell,))]
    return any(it.dim() > 1 if isinstance(it, Tensor) else _reads_tensors(it) for it in held)


def _pads_before(mask: Tensor) -> Tensor:
    """Return (batch,) how many tokens of padding each row of a (batch, seq) mask begins with."""
    return (mask.cumsum(-1) == 0).sum(-1)
