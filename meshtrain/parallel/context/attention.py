"""Attention of tokens in parts to the full sequence, and the masks that it needs.

transformers calls both through its interfaces, by the name that a configuration has. The function
that computes attention is still the one of the model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshtrain.compat.nn import parameter_table
from meshtrain.compat.transformers import mask_function_of
from meshtrain.config.plan import ContextMethod
from meshtrain.parallel.context.collectives import to_heads, to_parts
from meshtrain.parallel.context.columns import Columns

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""Maps the indices of batch, head, query and key to whether the query sees the key."""

Attention = Callable[..., tuple[Tensor, Any]]
"""The function of a model: (module, query, key, value, mask, **others) -> output, others."""


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
        self._documents: tuple[Tensor, Tensor] | None = None

    def begin(self, positions: Tensor | None, pads: Tensor | None) -> None:
        """Note what the masks of the next forward pass depend on.

        Args:
            positions: (batch, seq) of the full sequence; None if they count from its start. Each
                document begins where they do not go on by one.
            pads: (batch, seq) False for padding; None without any.
        """
        self._pads = pads
        self._documents = None
        if positions is not None:
            begins = positions.diff(prepend=positions[:, :1] - 1) != 1
            self._documents = positions, begins.cumsum(-1)

    def __call__(self, *, mask_function: MaskFunction, kv_length: int, **kwargs: Any) -> Any:
        """Return a mask for the queries that this rank computes, as the model's attention takes it.

        Args:
            mask_function: of the full sequence.
            kv_length: length of the full sequence.
            kwargs: further arguments of the function for masks.
        """
        whole = self._inside_documents(mask_function)
        kwargs["kv_length"] = kv_length
        if self._documents is not None:
            kwargs["allow_is_causal_skip"] = False
        if self._method == "ulysses":
            kwargs |= {"mask_function": whole, "q_length": kv_length, "attention_mask": self._pads}
        else:
            kwargs |= self._of_part(whole, kv_length, kwargs.get("device", "cpu"))
        return mask_function_of(self._base)(**kwargs)

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
