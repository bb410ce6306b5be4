"""The table [batch_ramp] of a run file."""

import math
from typing import Self

from pydantic import model_validator

from meshtrain.config.settings import Count, Settings
from meshtrain.errors import ConfigError


class BatchRampConfig(Settings):
    """Smaller global batches in the first steps. They grow in equal increments, and each size lasts
    for the same number of steps, up to `global_batch_size`."""

    first: Count | None = None
    """Number of sequences in the first step. Left out: every step has `global_batch_size`."""
    increment: Count | None = None
    """Number of sequences by which a batch is larger than the smaller ones. Left out: `first`."""
    steps: Count | None = None
    """Number of steps before the first one with `global_batch_size`."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.first is None:
            for key in ("increment", "steps"):
                if getattr(self, key) is not None:
                    raise ConfigError(f"`{key}` is not read without `first`", "set `first`, or leave it out")
        elif self.steps is None:
            raise ConfigError("`first` is set, and `steps` is not", "set it to the length of the ramp")
        return self

    def problem_with(self, largest: int) -> ConfigError | None:
        """Return why a batch cannot grow to `largest` sequences; None if it can."""
        if self.first is None or self.steps is None:
            return None
        missing, by = largest - self.first, self.increment or self.first
        if missing <= 0 or missing % by:
            return ConfigError(
                f"`batch_ramp` grows from {self.first} by {by}, which does not lead to `global_batch_size` = {largest}",
                "choose another `first` or `increment`",
            )
        if self.steps < missing // by:
            return ConfigError(
                f"`batch_ramp` has {missing // by} sizes below `global_batch_size`, and only {self.steps} steps",
                "raise `steps` or `increment`",
            )
        return None

    def sizes(self, largest: int) -> list[int]:
        """Return the sizes of the steps of the ramp, up to `largest`, which is not among them."""
        return [] if self.first is None else list(range(self.first, largest, self.increment or self.first))

    def unit(self, largest: int) -> int:
        """Return the number of sequences that all batches are multiples of, `largest` included."""
        return math.gcd(largest, *self.sizes(largest))

    def batches(self, largest: int) -> list[int]:
        """Return the number of sequences in each step of the ramp."""
        sizes, steps = self.sizes(largest), self.steps or 0
        return [sizes[step * len(sizes) // steps] for step in range(steps)] if sizes else []


NO_RAMP = BatchRampConfig()
