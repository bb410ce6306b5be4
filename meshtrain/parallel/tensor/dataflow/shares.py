"""Say how wide the parts of a fused projection are, in numbers of the model's configuration.

A width alone does not tell what it counts. So the parts are those of two copies with other numbers
of heads, and a share is a number that is in proportion to the widths in both.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from transformers import PretrainedConfig

from meshtrain.parallel.tensor.dataflow.blocks import Part

# A key and a value that all heads share, in one part.
MOST_SHARED = 2
# Preferred to other numbers that are in the same proportion.
OF_HEADS = ("num_attention_heads", "num_key_value_heads")
PARTS = ("first", "second", "third", "fourth", "fifth", "sixth")
Pair = tuple[int, int]
"""The values of one thing in both copies."""
Share = int | str


def find_shares(
    parts: Sequence[Part], larger: Sequence[Part], configs: tuple[PretrainedConfig, PretrainedConfig]
) -> tuple[Share, ...] | None:
    """Return the share of each part, a number or the name of one; None if there are none.

    Args:
        parts: of a projection.
        larger: parts of the same projection in a copy with more heads.
        configs: of both copies.
    """
    if [part.kind for part in parts] != [part.kind for part in larger]:
        return None
    widths = [(one.width, other.width) for one, other in zip(parts, larger, strict=True)]
    if len({*widths}) == 1:
        return (1,) * len(parts)
    numbers = _numbers(configs)
    for unit in _units(widths[0], numbers.values()):
        shares = [_share(part, pair, unit, numbers) for part, pair in zip(parts, widths, strict=True)]
        found = tuple(share for share in shares if share is not None)
        if len(found) == len(parts):
            return found
    return None


def part_names(shares: Sequence[Share]) -> tuple[str, ...]:
    """Return a name for each part of a fused projection.

    Key and value, in some order, are called so if they have fewer heads than the query: processes
    may have to share these.
    """
    queries, keys = OF_HEADS
    return ("q", "k", "v") if [*shares] == [queries, keys, keys] else PARTS[: len(shares)]


def _numbers(configs: tuple[PretrainedConfig, PretrainedConfig]) -> dict[str, Pair]:
    """Return name -> values, for the numbers of heads first, and only for those that differ."""
    one, other = (config.get_text_config() for config in configs)
    found = {}
    for name in dict.fromkeys((*OF_HEADS, *one.to_dict())):
        first, second = getattr(one, name, None), getattr(other, name, None)
        if type(first) is type(second) is int and first != second and min(first, second) > 0:
            found[name] = first, second
    return found


def _units(width: Pair, numbers: Iterable[Pair]) -> Iterator[Pair]:
    """Yield the widths of a share of one, if a number is the share of a part with this width."""
    for number in numbers:
        if not width[0] % number[0] and not width[1] % number[1]:
            yield width[0] // number[0], width[1] // number[1]


def _share(part: Part, width: Pair, unit: Pair, numbers: Mapping[str, Pair]) -> Share | None:
    if width[0] % unit[0] or width[1] % unit[1]:
        return None
    share = width[0] // unit[0], width[1] // unit[1]
    if part.kind == "shared" and share[0] == share[1] <= MOST_SHARED:
        return share[0]
    return next((name for name, number in numbers.items() if number == share), None)
