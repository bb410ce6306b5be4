"""The number that the loss is multiplied by, so that small gradients survive in float16."""

from dataclasses import dataclass

from meshtrain.checkpoint.manifest import SavedLossScale
from meshtrain.config.plan import LossScalePlan, PrecisionPlan
from meshtrain.config.settings import LARGEST

UNSCALED = LossScalePlan(initial=1.0, minimum=1.0, growth_interval=LARGEST)
"""A scale that is 1 for ever: nothing is tolerated, and nothing grows."""


@dataclass
class LossScale:
    """Dynamic loss scaling: lower after overflows, higher after a long time without one.

    Attributes:
        value: of the next step.
        growth_steps: steps without an overflow since the last overflow or growth.
        hysteresis_left: overflows until one lowers the scale; not refilled by anything but growth.

    Source: Megatron-LM, megatron/core/optimizer/grad_scaler.py, DynamicGradScaler.
    """

    plan: LossScalePlan
    value: float
    growth_steps: int
    hysteresis_left: int

    @property
    def can_be_lower(self) -> bool:
        """Whether an overflow may come from the scale."""
        return self.value > self.plan.minimum

    def update(self, *, overflowed: bool) -> None:
        """Move on by one step."""
        if overflowed:
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

    def metrics(self, num_skipped: int) -> dict[str, float]:
        """Return what the next step is scaled by and how many were skipped; nothing if there is no scaling."""
        return {} if self.plan is UNSCALED else {"loss_scale": self.value, "skipped_steps": num_skipped}

    def saved(self) -> SavedLossScale | None:
        """Return what a checkpoint keeps; None if there is no scaling."""
        if self.plan is UNSCALED:
            return None
        return SavedLossScale(value=self.value, growth_steps=self.growth_steps, hysteresis_left=self.hysteresis_left)

    def restore(self, saved: SavedLossScale | None) -> None:
        """Go on from a checkpoint; from one that had no scaling, with the initial scale of the plan."""
        if saved is not None and self.plan is not UNSCALED:
            self.value, self.growth_steps = saved.value, saved.growth_steps
            self.hysteresis_left = saved.hysteresis_left


def build_loss_scale(precision: PrecisionPlan) -> LossScale:
    """Return the scale that a run starts with: dynamic for float16, else 1 for ever."""
    plan = precision.loss_scale if precision.compute == "float16" else UNSCALED
    return LossScale(plan, value=plan.initial, growth_steps=0, hysteresis_left=plan.hysteresis)
