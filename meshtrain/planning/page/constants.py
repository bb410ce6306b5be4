"""The constants of a machine: their values, and where these come from."""

from collections.abc import Sequence

from meshtrain.config.machine import LinkConfig, MachineConfig
from meshtrain.pictures.scales import shown_value
from meshtrain.pictures.tables import Table
from meshtrain.planning.machine import Machine

MEASURED = "measured"
MOST_POINTS = 6
"""Points of a curve that are all shown."""


def constants_table(machine: Machine) -> Table:
    """Return the constants that a machine has."""
    config = machine.config
    rows = tuple(
        (name.removeprefix("speed."), text, _source(config, name))
        for name in config.constants()
        if (text := _value(config, name))
    )
    return Table(f"Constants of {machine.name}", ("constant", "value", "source"), rows)


def _source(config: MachineConfig, name: str) -> str:
    own = config.sources.get(name)
    if name not in config.measured:
        return own or config.source
    return MEASURED if own is None else f"{MEASURED}: {own}"


def _value(config: MachineConfig, name: str) -> str:
    """Return a value as text; empty if the file has none."""
    value = getattr(config.speed if name.startswith("speed.") else config, name.removeprefix("speed."))
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return _number(value)
        case LinkConfig():
            return f"{value.gb_per_second:g} GB/s, {shown_value(value.seconds, 'seconds')}"
        case list():
            return _curve(value)
        case dict():
            return ", ".join(f"{key} {_entry(entry)}" for key, entry in value.items())
    raise TypeError(f"{name}: {value!r}")


def _entry(entry: object) -> str:
    match entry:
        case float() | int():
            return _number(entry)
        case list():
            return f"({len(entry)} points)"
        case dict():
            return f"({', '.join(map(str, entry))} processes)"
    raise TypeError(f"{entry!r}")


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Return the points, or the first and the last of many."""
    few = points if len(points) <= MOST_POINTS else (points[0], points[-1])
    text = (", " if few is points else " … ").join(f"{_number(value)} at {_number(size)}" for size, value in few)
    return text if few is points else f"{text} ({len(points)} points)"


def _number(value: float) -> str:
    return f"{value:.4g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
