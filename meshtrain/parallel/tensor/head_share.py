"""Which attention heads a process computes, also where tp does not divide their number."""

from dataclasses import dataclass

from transformers import PretrainedConfig

from meshtrain.models.layer_config import values_in_layers


@dataclass(frozen=True)
class Heads:
    """The numbers of attention heads of a model.

    Attributes:
        queries: number of query heads.
        keys: number of key-value heads. It divides that of the query heads.
    """

    queries: int
    keys: int

    def of(self, rank: int, tp: int) -> "HeadShare":
        """Return the heads of process `rank` of `tp`; the shares differ by at most one head."""
        first, last = (self.queries * at // tp for at in (rank, rank + 1))
        needed = [query * self.keys // self.queries for query in range(first, last)]
        unique = [*dict.fromkeys(needed)]
        groups = len(needed) // max(1, len(unique))
        # The model repeats every key-value head equally often, so heads that are needed less often
        # than others are computed once for each query head.
        keys = unique if needed == [key for key in unique for _ in range(groups)] else needed
        return HeadShare(range(first, last), tuple(keys))


@dataclass(frozen=True)
class HeadShare:
    """The heads of one process.

    Attributes:
        queries: indices of its query heads.
        keys: indices of the key-value heads that it computes, in order; some may come again.
    """

    queries: range
    keys: tuple[int, ...]

    @property
    def groups(self) -> int:
        """How many query heads use each key-value head."""
        return len(self.queries) // max(1, len(self.keys))


def heads_of(config: PretrainedConfig) -> Heads | None:
    """Return the numbers of heads, None if layers differ in them or the model has none.

    Args:
        config: of the language model.
    """
    # Falcon has the last name.
    names = ("num_attention_heads", "num_key_value_heads", "num_kv_heads")
    queries, *found = (values[0] if len(values) == 1 else 0 for values in (values_in_layers(config, n) for n in names))
    keys = next((count for count in found if count is not None), queries)
    if not isinstance(queries, int) or not isinstance(keys, int) or queries < 1 or keys < 1 or queries % keys:
        return None
    return Heads(queries, keys)


def uneven_heads(config: PretrainedConfig, tp: int) -> Heads | None:
    """Return the numbers of heads if tp does not divide both of them, and None otherwise."""
    heads = heads_of(config)
    return heads if heads is not None and (heads.queries % tp or heads.keys % tp) else None


def local_value(value: object, heads: Heads | None, rank: int, tp: int) -> int | None:
    """Return this process's part of a number of heads, or of a width.

    Args:
        value: the number or width of all processes.
        heads: of the model, if tp does not divide their numbers.
        rank: of the process.
        tp: number of processes that share the heads.

    Returns:
        None if the value has no such part.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        return None
    if heads is not None and value == heads.keys != heads.queries:
        return len(heads.of(rank, tp).keys)
    if heads is not None and value % heads.queries == 0:
        return value // heads.queries * len(heads.of(rank, tp).queries)
    return value // tp if value % tp == 0 else None
