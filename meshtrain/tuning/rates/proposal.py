"""Which learning rates a trial proposes.

The losses are those of a run whose rate grows by the same factor in each step. The loss does not
change while the rate is too low, then it falls, and at last it rises.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

PARTS = 25
"""The loss of a rate is averaged over this fraction of the steps on each side."""
RISE = 1.1
"""The loss rises again where it is this many times its lowest."""
MARGIN = 10
"""The usual distance to the rate at which the loss rises again."""


@dataclass(frozen=True)
class Trial:
    """The learning rate and the loss of each step.

    Attributes:
        rates: ascending.
        losses: in nats per token; the last ones may be not finite.
    """

    rates: list[float]
    losses: list[float]


@dataclass(frozen=True)
class Proposal:
    """What the losses of a trial say.

    Attributes:
        smooth: the loss of each rate, averaged with those beside it; without the end that is not
            finite.
        steepest: the rate at which the loss falls fastest; None if it does not fall.
        lowest: the rate with the lowest loss.
        rising: the rate above it from which the loss rises again; None if it does not.
    """

    smooth: tuple[float, ...]
    steepest: float | None
    lowest: float
    rising: float | None

    @property
    def below_rising(self) -> float | None:
        """Return the rate a margin below the one from which the loss rises again."""
        return None if self.rising is None else self.rising / MARGIN

    def sentences(self) -> list[str]:
        """Return what is proposed, a line each."""
        if self.steepest is None:
            return ["The loss does not fall at any of these rates: pass a lower --lowest or more --steps"]
        rate = f"{self.steepest:.1e}"
        lines = [f"The loss falls fastest at {rate}: proposed is optimizer.learning_rate={rate}"]
        if self.below_rising is None:
            return [*lines, "It does not rise again: a higher --highest would show where it does"]
        return [
            *lines,
            f"It is lowest at {self.lowest:.1e} and rises from {self.rising:.1e}; the usual advice, a factor of "
            f"{MARGIN} below, is {self.below_rising:.1e}",
        ]


def propose(trial: Trial) -> Proposal:
    """Find the rates that a trial proposes.

    Args:
        trial: with at least one loss that is finite, the first.
    """
    finite = next((place for place, loss in enumerate(trial.losses) if not math.isfinite(loss)), len(trial.losses))
    smooth = _smooth(trial.losses[:finite], max(1, finite // PARTS))
    lowest = min(range(finite), key=smooth.__getitem__)
    # The rates have equal ratios, so differences are slopes over the logarithm of the rate.
    slopes = {place: smooth[place + 1] - smooth[place - 1] for place in range(1, min(lowest, finite - 2) + 1)}
    steepest = min(slopes, key=slopes.__getitem__, default=None)
    rising = next((place for place in range(lowest, finite) if smooth[place] > RISE * smooth[lowest]), None)
    if rising is None and finite < len(trial.losses):
        rising = finite
    return Proposal(
        smooth=tuple(smooth),
        steepest=None if steepest is None or slopes[steepest] >= 0 else trial.rates[steepest],
        lowest=trial.rates[lowest],
        rising=None if rising is None else trial.rates[rising],
    )


def _smooth(losses: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each loss and its neighbors, on both sides, so that nothing is delayed."""
    windows = (losses[max(0, place - reach) : place + reach + 1] for place in range(len(losses)))
    return [sum(window) / len(window) for window in windows]
