"""How processes and sizes are named, on the screen and on pages."""

from meshtrain.planning.machine import GIB


def rank_range(pp_rank: int, width: int) -> str:
    """Return the processes of a pp rank as "8-15".

    Args:
        pp_rank: index.
        width: number of processes of each pp rank.
    """
    first = pp_rank * width
    return str(first) if width == 1 else f"{first}-{first + width - 1}"


def ranks_named(pp_rank: int, width: int) -> str:
    """Return the processes of a pp rank as "ranks 8-15"."""
    return f"{'rank' if width == 1 else 'ranks'} {rank_range(pp_rank, width)}"


def gib(num_bytes: int) -> str:
    """Return a number of bytes in GiB."""
    return f"{num_bytes / GIB:,.2f}" if num_bytes >= 0.1 * GIB else f"{num_bytes / GIB:.4f}"


def shown_seconds(seconds: float) -> str:
    """Return seconds with four digits."""
    return f"{seconds:,.4g}"
