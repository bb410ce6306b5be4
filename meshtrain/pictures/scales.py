"""Scales of axes: where a value is drawn, which round values get a tick, and how they are shown."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Quantity = Literal["number", "bytes", "seconds"]


@dataclass(frozen=True)
class Unit:
    """A unit of a quantity.

    Attributes:
        name: such as "GiB".
        size: in the smallest unit, or in seconds.
        least: value from which the unit is used, if that is more than one.
    """

    name: str
    size: float
    least: float = 0.0


PLAIN = (Unit("", 1),)
BYTES = tuple(Unit(name, 1024**power) for power, name in enumerate(("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")))
SECONDS = (Unit("µs", 1e-6), Unit("ms", 1e-3), Unit("s", 1), Unit("min", 60, least=600), Unit("h", 3600))
UNITS: dict[Quantity, tuple[Unit, ...]] = {"number": PLAIN, "bytes": BYTES, "seconds": SECONDS}


def unit_for(largest: float, quantity: Quantity) -> Unit:
    """Return the largest unit that is not too large for a value, or else the smallest one."""
    units = UNITS[quantity]
    fitting = (unit for unit in units if max(unit.size, unit.least) <= abs(largest))
    return max(fitting, key=lambda unit: unit.size, default=units[0])


def shown_value(value: float, quantity: Quantity = "number") -> str:
    """Return a value with three or four digits and its unit."""
    if not math.isfinite(value):
        return "not finite"
    unit = unit_for(value, quantity)
    return f"{_digits(value / unit.size)} {unit.name}".rstrip()


def _digits(value: float) -> str:
    size = abs(value)
    if size == 0 or 1e-3 <= size < 1e7:
        decimals = 0 if size >= 1000 or size == 0 else 2 - min(2, math.floor(math.log10(size)))
        whole, _, rest = f"{value:,.{decimals}f}".partition(".")
        return f"{whole}.{rest}" if rest.strip("0") else whole
    return _power_text(value, digits=2)


@dataclass(frozen=True)
class Scale:
    """Maps values to pixels.

    Attributes:
        low: the smallest value.
        high: the largest value; larger than `low`.
        start: pixel of the smallest value.
        end: pixel of the largest value.
        is_log: whether equal ratios have equal lengths; `low` is then positive.
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value. A value beyond an end of the scale is drawn at that end."""
        value = min(max(value, self.low), self.high)
        low, high, here = (math.log10(one) if self.is_log else one for one in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (here - low) / (high - low)

    def ticks(self, most: int, unit: Unit = PLAIN[0]) -> list[tuple[float, str]]:
        """Return round values of the scale, each with its text, without the unit.

        Args:
            most: number of ticks at most, at least 2.
            unit: in which the values are round.
        """
        low, high = self.low / unit.size, self.high / unit.size
        if self.is_log and len(values := _log_ticks(low, high, most)) > 2:
            return [(value * unit.size, _power_text(value)) for value in values]
        step = round_step((high - low) / most)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        # Rounded, because 3 * 0.1 is not 0.3.
        values = [round(step * index, decimals + 1) for index in range(first, last + 1)]
        return [(value * unit.size, _tick_text(value, decimals)) for value in values]


def round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _tick_text(value: float, decimals: int) -> str:
    if abs(value) >= 1e6 or decimals > 4:
        return "0" if value == 0 else f"{value:.2g}".replace("e+0", "e").replace("e-0", "e-")
    return f"{value:,.{decimals}f}"


def _power_text(value: float, *, digits: int = 0) -> str:
    if digits == 0 and 1e-3 <= value < 1e6:
        return f"{value:,.10g}"
    mantissa, _, power = f"{value:.{digits}e}".partition("e")
    shown = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{shown}e{int(power)}"


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """Return powers of ten, or fewer of them, or 2 and 5 times them as well, as many as fit.

    There may be hardly any; then ticks in equal steps are better.
    """
    powers = range(math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9) + 1)

    def inside(factors: Sequence[int], every: int = 1) -> list[float]:
        values = [float(f"{factor}e{power}") for power in powers if power % every == 0 for factor in factors]
        return [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]

    for factors in ((1, 2, 5), (1, 3), (1,)):
        if len(found := inside(factors)) <= most:
            return found
    return inside((1,), every=math.ceil(len(powers) / most))


def padded_range(values: Sequence[float], *, from_zero: bool, is_log: bool) -> tuple[float, float]:
    """Return the ends of a scale on which all values can be seen.

    Args:
        values: at least one; positive if `is_log`.
        from_zero: whether the scale begins at zero.
        is_log: whether the scale is logarithmic.
    """
    low, high = min(values), max(values)
    if is_log:
        return (low / 1.1, high * 1.1) if low < high else (low / 2, high * 2)
    if from_zero:
        low = min(low, 0.0)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return (low if from_zero and low == 0 else low - room), high + room
