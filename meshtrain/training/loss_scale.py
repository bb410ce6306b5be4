"""The number that the loss is multiplied by, so that small gradients survive in float16."""

import sys
from dataclasses import dataclass

from meshtrain.checkpoint.directory import SavedLossScale
from meshtrain.config.plan import LossScalePlan, PrecisionPlan

UNSCALED = LossScalePlan(initial=1.0, minimum=1.0, growth_interval=sys.maxsize)
"""A scale that is 1 for ever: nothing is tolerated, and nothing grows."""


@dataclass
class LossScale:
    """Dynamic loss scaling: lower after overflows, higher after a long time without one.

    As in Megatron-LM, the data goes on after an overflow, but the step counts for nothing else: neither the schedule of
    the learning rate nor AdamW's bias correction moves on, so both are functions of `step - num_skipped`.

    Attributes:
        value: of the next step.
        growth_steps: steps without an overflow since the last overflow or growth.
        hysteresis_left: overflows until one lowers the scale; not refilled by anything but growth.
        num_skipped: steps of the run that overflowed.

    Source: Megatron-LM, megatron/core/optimizer/grad_scaler.py, DynamicGradScaler.
    """

    plan: LossScalePlan
    value: float
    growth_steps: int
    hysteresis_left: int
    num_skipped: int = 0

    @property
    def can_be_lower(self) -> bool:
        """Whether an overflow may come from the scale."""
        return self.value > self.plan.minimum

    def update(self, *, overflowed: bool) -> None:
        """Move on by one step."""
        if overflowed:
            self.num_skipped += 1
            self.growth_steps = 0
            self.hysteresis_left -= 1
            if self.hysteresis_left <= 0:
                self.value = max(self.value * self.plan.backoff_factor, self.plan.minimum)
            return
        self.growth_steps += 1
        if self.growth_steps == self.plan.growth_interval:
            self.growth_steps = 0
            self.hysteresis_left = self.plan.hysteresis
            self.value *= self.plan.growth_factor

    def metrics(self) -> dict[str, float]:
        """Return what the next step is scaled by and how many were skipped; nothing if there is no scaling."""
        return {} if self.plan is UNSCALED else {"loss_scale": self.value, "skipped_steps": self.num_skipped}

    def saved(self) -> SavedLossScale | None:
        """Return what a checkpoint keeps beside `num_skipped`."""
        if self.plan is UNSCALED:
            return None
        return SavedLossScale(value=self.value, growth_steps=self.growth_steps, hysteresis_left=self.hysteresis_left)

    def restore(self, saved: SavedLossScale | None, num_skipped: int) -> None:
        """Go on from a checkpoint; from one that had no scaling, with the initial scale of the plan."""
        self.num_skipped = num_skipped
        if saved is not None and self.plan is not UNSCALED:
            self.value, self.growth_steps = saved.value, saved.growth_steps
            self.hysteresis_left = saved.hysteresis_left


def build_loss_scale(precision: PrecisionPlan) -> LossScale:
    """Return the scale that a run starts with: dynamic for float16, else 1 for ever."""
    plan = precision.loss_scale if precision.compute == "float16" else UNSCALED
    return LossScale(plan, value=plan.initial, growth_steps=0, hysteresis_left=plan.hysteresis)
