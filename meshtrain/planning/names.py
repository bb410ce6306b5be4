"""How processes and sizes are named, on the screen and on pages."""

from collections.abc import Sequence
from itertools import groupby

from meshtrain.planning.machine import GIB

# More pieces of a list of ranks are not shown.
MOST_PIECES = 3


def rank_range(ranks: Sequence[int]) -> str:
    """Return ranks as "0-6, 8-14"; of many pieces the first ones, and how many ranks there are."""
    runs = [[at for _, at in run] for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])]
    pieces = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(pieces) <= MOST_PIECES:
        return ", ".join(pieces)
    return f"{', '.join(pieces[:MOST_PIECES])} and others, {len(ranks)} in all"


def ranks_named(ranks: Sequence[int]) -> str:
    """Return ranks as "ranks 8-15", or "rank 8"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {rank_range(ranks)}"


def gib(num_bytes: int) -> str:
    """Return a number of bytes in GiB."""
    return f"{num_bytes / GIB:,.2f}" if num_bytes >= 0.1 * GIB else f"{num_bytes / GIB:.4f}"


def shown_seconds(seconds: float) -> str:
    """Return seconds with four digits."""
    return f"{seconds:,.4g}"
