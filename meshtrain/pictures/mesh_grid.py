"""The processes of a mesh as a grid, with what each of them holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from meshtrain.pictures.colors import SERIES
from meshtrain.pictures.svg import Picture, box, label, text_width, wrapped

CELL_WIDTH, CELL_HEIGHT, GROUP_GAP = 38, 26, 10
TEXT_WIDTH, LINE_HEIGHT, ROW_GAP = 300, 16, 14
MOST_ROWS = 48
"""Number of pp ranks that are drawn at most."""


@dataclass(frozen=True)
class MeshGrid:
    """Which process holds what.

    Attributes:
        holds: what the processes of each pp rank hold, in words.
        axes: name and degree of the other axes, outermost first. The last one is innermost (tp):
            its processes are drawn in one frame.
    """

    holds: tuple[str, ...]
    axes: tuple[tuple[str, int], ...]

    @property
    def width(self) -> int:
        """Return the number of processes of a pp rank."""
        return prod(degree for _, degree in self.axes)

    @property
    def outer(self) -> tuple[tuple[str, int], ...]:
        """Return the axes between pp and the innermost one that have several processes."""
        return tuple((name, degree) for name, degree in self.axes[:-1] if degree > 1)

    def named(self) -> str:
        """Return the degrees as "pp 2 x dp_shard 4 x tp 2 = 16 processes"."""
        degrees = [("pp", len(self.holds)), *self.axes]
        shown = " x ".join(f"{name} {degree:,}" for name, degree in degrees if degree > 1) or "one"
        total = len(self.holds) * self.width
        return f"{shown} = {total:,} processes" if total > 1 else "one process"


def draw_mesh(mesh: MeshGrid, width: int) -> Picture:
    """Return a row for each pp rank, with a cell for each process.

    Where there is no room for all processes of a row, those that hold the same layers in other
    data-parallel groups are drawn once, with their number.
    """
    # Room for the frame of the first row.
    rows, top = [], 3.0
    shown = _shown_rows(len(mesh.holds))
    for before, pp_rank in zip([-1, *shown], shown, strict=False):
        if pp_rank > before + 1:
            text = f"… {pp_rank - before - 1:,} more pp ranks"
            rows.append(label(0, top + 14, text, style="muted"))
            top += LINE_HEIGHT + ROW_GAP
        row, height = _row(mesh, pp_rank, width, top)
        rows.append(row)
        top += height + ROW_GAP
    description = " ".join(
        [f"{mesh.named()}.", *(f"{_named(mesh, pp_rank)}: {mesh.holds[pp_rank]}." for pp_rank in shown)]
    )
    return Picture(f"The mesh: {mesh.named()}", description, width, top, "".join(rows))


def _shown_rows(number: int) -> Sequence[int]:
    return range(number) if number <= MOST_ROWS else [*range(MOST_ROWS - 1), number - 1]


def _named(mesh: MeshGrid, pp_rank: int) -> str:
    first = pp_rank * mesh.width
    name = f"pp {pp_rank}: " if len(mesh.holds) > 1 else ""
    return f"{name}rank {first}" if mesh.width == 1 else f"{name}ranks {first}-{first + mesh.width - 1}"


def _row(mesh: MeshGrid, pp_rank: int, width: int, top: float) -> tuple[str, float]:
    """Return a row and its height. The text is beside the cells, or above them on a phone."""
    is_wide = width > 500
    lines = wrapped(mesh.holds[pp_rank], TEXT_WIDTH if is_wide else width)
    text = label(0, top + 12, _named(mesh, pp_rank), style="strong") + "".join(
        label(0, top + 12 + LINE_HEIGHT * (index + 1), one, style="muted") for index, one in enumerate(lines)
    )
    text_height = LINE_HEIGHT * (len(lines) + 1)
    if is_wide:
        cells = _cells(mesh, pp_rank, TEXT_WIDTH + 20, width, top)
        return text + cells, max(text_height, CELL_HEIGHT + 8)
    return text + _cells(mesh, pp_rank, 4, width, top + text_height + 4), text_height + CELL_HEIGHT + 12


def _cells(mesh: MeshGrid, pp_rank: int, left: float, right: float, top: float) -> str:
    _, inner = mesh.axes[-1]
    groups = list(product(*(range(degree) for _, degree in mesh.axes[:-1])))
    step = inner * CELL_WIDTH + GROUP_GAP
    if len(groups) * step - GROUP_GAP + 4 <= right - left:
        return "".join(_group(mesh, pp_rank, group, left + index * step, top) for index, group in enumerate(groups))
    return _collapsed(mesh, pp_rank, left, right, top)


def _collapsed(mesh: MeshGrid, pp_rank: int, left: float, right: float, top: float) -> str:
    """Draw the first group, as a stack, with the number of groups."""
    number, (name, inner) = mesh.width // mesh.axes[-1][1], mesh.axes[-1]
    axes = " x ".join(f"{axis} {degree:,}" for axis, degree in mesh.outer)
    times = [f"× {number:,}", f"× {number:,}  ({axes})"] if number > 1 else [""]
    room = right - left - text_width(times[0], strong=True) - 20
    if inner * CELL_WIDTH <= room:
        across: float = inner * CELL_WIDTH
        first = _group(mesh, pp_rank, (0,) * (len(mesh.axes) - 1), left, top)
    else:
        across = min(room, text_width(f"{name} {inner:,}") + 60)
        style = _style(pp_rank)
        first = box(left, top, across, CELL_HEIGHT, f"{style} cell", tip=_named(mesh, pp_rank)) + label(
            left + across / 2, top + 17, f"{name} 0-{inner - 1:,}", anchor="middle", style=f"on-{style} small"
        )
    behind = "".join(box(left + shift, top + shift, across, CELL_HEIGHT, f"{_style(pp_rank)} cell") for shift in (6, 3))
    text = max(
        (one for one in times if across + 16 + text_width(one, strong=True) <= right - left), key=len, default=""
    )
    stack = behind if number > 1 else ""
    return stack + first + label(left + across + 14, top + 18, text, style="strong")


def _group(mesh: MeshGrid, pp_rank: int, group: tuple[int, ...], left: float, top: float) -> str:
    """Draw the processes of one innermost group in a frame."""
    degrees = [degree for _, degree in mesh.axes]
    style, inner = _style(pp_rank), degrees[-1]
    drawn = []
    for place in range(inner):
        coordinates = (*group, place)
        rank = pp_rank
        for coordinate, degree in zip(coordinates, degrees, strict=True):
            rank = rank * degree + coordinate
        x = left + place * CELL_WIDTH
        tip = f"rank {rank}: {_coordinates(mesh, pp_rank, coordinates)}. {mesh.holds[pp_rank]}"
        drawn.append(box(x, top, CELL_WIDTH, CELL_HEIGHT, f"{style} cell", tip=tip))
        drawn.append(label(x + CELL_WIDTH / 2, top + 17, str(rank), anchor="middle", style=f"on-{style} small"))
    frame = box(left - 2, top - 2, inner * CELL_WIDTH + 4, CELL_HEIGHT + 4, "frame") if inner > 1 else ""
    return frame + "".join(drawn)


def _coordinates(mesh: MeshGrid, pp_rank: int, coordinates: tuple[int, ...]) -> str:
    names = [("pp", pp_rank), *((name, one) for (name, _), one in zip(mesh.axes, coordinates, strict=True))]
    return ", ".join(f"{name} {one}" for name, one in names)


def _style(pp_rank: int) -> str:
    return SERIES[pp_rank % len(SERIES)]
