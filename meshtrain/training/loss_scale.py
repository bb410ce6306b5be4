"""Loss scaling: the loss is multiplied by a number, so that small gradients survive in float16."""

from dataclasses import dataclass

from meshtrain.checkpoint.manifest import SavedLossScale
from meshtrain.config.plan import LossScalePlan, PrecisionPlan
from meshtrain.config.settings import LARGEST

UNSCALED = LossScalePlan(initial=1.0, minimum=1.0, growth_interval=LARGEST)
"""A scale that is always 1: no overflow is tolerated, and the scale never grows."""


@dataclass
class LossScale:
    """Dynamic loss scaling: lower after overflows, higher after a long time without one.

    Attributes:
        value: the scale of the next step.
        growth_steps: number of steps without an overflow since the last overflow or growth.
        hysteresis_left: number of overflows until one lowers the scale; only growth refills it.

    Source: Megatron-LM, megatron/core/optimizer/grad_scaler.py, DynamicGradScaler.
    """

    plan: LossScalePlan
    value: float
    growth_steps: int
    hysteresis_left: int

    @property
    def can_be_lower(self) -> bool:
        """Return whether an overflow may come from the scale, so that a lower one can help."""
        return self.value > self.plan.minimum

    def update(self, *, overflowed: bool) -> None:
        """Adjust the scale after a step."""
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
        """Return the next scale and the number of skipped steps; nothing if there is no scaling."""
        return {} if self.plan is UNSCALED else {"loss_scale": self.value, "skipped_steps": num_skipped}

    def saved(self) -> SavedLossScale | None:
        """Return what a checkpoint keeps; None if there is no scaling."""
        if self.plan is UNSCALED:
            return None
        return SavedLossScale(value=self.value, growth_steps=self.growth_steps, hysteresis_left=self.hysteresis_left)

    def restore(self, saved: SavedLossScale | None) -> None:
        """Take over the scale of a checkpoint; without one, keep the initial scale of the plan."""
        if saved is not None and self.plan is not UNSCALED:
            self.value, self.growth_steps = saved.value, saved.growth_steps
            self.hysteresis_left = saved.hysteresis_left


def build_loss_scale(precision: PrecisionPlan) -> LossScale:
    """Return the scale that a run starts with: dynamic for float16, otherwise always 1."""
    plan = precision.loss_scale if precision.compute == "float16" else UNSCALED
    return LossScale(plan, value=plan.initial, growth_steps=0, hysteresis_left=plan.hysteresis)
