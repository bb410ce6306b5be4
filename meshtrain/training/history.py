"""History of a run's steps: which changed nothing, which were bad, and which values are normal.

A step is bad if its loss or gradient norm is not finite. If `bad_steps.spike_z_score` is set, it is
also bad if one of them is far above those of the steps before. A float16 overflow that a lower loss
scale can resolve is skipped, but it is not bad.
"""

import math
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from meshtrain.checkpoint.manifest import SavedHistory
from meshtrain.config.run import BadStepsConfig
from meshtrain.errors import TrainingStopped

MAD_TO_DEVIATION = 1.4826
"""The standard deviation of a normal distribution, in median absolute deviations."""
LEAST_DEVIATION = 1e-3
"""Smallest standard deviation that is assumed, as a fraction of the median.

A window of equal values is a coincidence.
"""
SAMPLES_NAMED = 16


@dataclass(frozen=True)
class BadStep:
    """A step from which nothing was learned.

    Attributes:
        step: the optimizer step, counted from 1.
        data_step: the position of its batch in the data, counted from 0.
        sample_ids: the samples of the global batch.
        fault: what is wrong with the step.
    """

    step: int
    data_step: int
    sample_ids: np.ndarray
    fault: str

    def note(self, answer: str, how_often: int) -> dict[str, object]:
        """Return the step as an object for metrics.jsonl.

        Args:
            answer: how the run reacts: "skip" or "rewind".
            how_often: the number of times that it has reacted so, this one included.
        """
        samples = self.sample_ids.tolist()
        return {"bad_step": self.step, "fault": self.fault, "samples": samples, "answer": answer, "times": how_often}


@dataclass
class StepHistory:
    """What must be known of the steps so far to continue; all of it survives a restart.

    As in Megatron-LM, a skipped step uses up its data, but counts for nothing else. Neither the
    learning-rate schedule nor AdamW's bias correction advances, so both are functions of
    `step - num_skipped`.

    Attributes:
        num_skipped: number of steps that changed nothing: they were bad, or overflowed in float16.
        num_bad: number of these steps that were bad.
        bad_in_a_row: number of bad steps since the last good one.
        left_out: positions in the data of the batches that rewinds have left out, ascending.
        losses: losses of the latest good steps, if spikes are checked for.
        norms: gradient norms of the same steps.
    """

    config: BadStepsConfig = field(default_factory=BadStepsConfig)
    num_skipped: int = 0
    num_bad: int = 0
    bad_in_a_row: int = 0
    left_out: tuple[int, ...] = ()
    losses: deque[float] = field(default_factory=deque)
    norms: deque[float] = field(default_factory=deque)

    def fault(self, loss: float, norm: float) -> str | None:
        """Return what is wrong with a step; None if it is good."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"the loss is {loss}, the gradient norm {norm}"
        threshold, window = self.config.spike_z_score, self.config.window
        if threshold is None or len(self.losses) < window:
            return None
        for name, value, ordinary in (("loss", loss, self.losses), ("gradient norm", norm, self.norms)):
            if (score := robust_z_score(value, ordinary)) > threshold:
                return (
                    f"the {name} is {value:.4g}, {score:.1f} robust standard deviations above {median(ordinary):.4g}, "
                    f"the median of the last {window} good steps"
                )
        return None

    def check_tolerable(self, fault: str, step: int, sample_ids: np.ndarray) -> None:
        """Check that the run may continue after a bad step.

        Raises:
            TrainingStopped: if the policy is to stop at once, or there were too many bad steps.
        """
        policy, skips, rewinds = self.config.policy, self.config.max_skips, self.config.max_rewinds
        if policy == "stop":
            found, way = "", 'set bad_steps.policy to "skip" or "rewind"'
        elif policy == "skip" and self.bad_in_a_row >= skips:
            found = f"; {skips} bad steps in a row were skipped before it, and bad_steps.max_skips is {skips}"
            way = "raise bad_steps.max_skips"
        elif policy == "rewind" and len(self.left_out) >= rewinds:
            found = f"; rewinds before it: {len(self.left_out)}, and bad_steps.max_rewinds is {rewinds}"
            way = "raise bad_steps.max_rewinds"
        else:
            return
        raise TrainingStopped(
            f"step {step + 1}: {fault}{found}; stopped before the optimizer step, so the parameters and the last "
            f"checkpoint are as they were. Samples of this step: {name_samples(sample_ids)}",
            f"look at them, lower optimizer.learning_rate, set optimizer.max_gradient_norm, or {way}",
        )

    def add(self, loss: float, norm: float, *, is_bad: bool, is_skipped: bool) -> None:
        """Record one step."""
        self.num_skipped += is_skipped
        self.num_bad += is_bad
        if is_bad:
            self.bad_in_a_row += 1
        elif not is_skipped:
            self.bad_in_a_row = 0
        if self.config.spike_z_score is not None and not is_skipped:
            self._remember([loss], [norm])

    def metrics(self) -> dict[str, float]:
        """Return the number of bad steps so far; nothing if the first one would end the run."""
        return {} if self.config.policy == "stop" else {"bad_steps": self.num_bad + len(self.left_out)}

    def saved(self) -> SavedHistory | None:
        """Return what a checkpoint keeps besides `num_skipped`; None if it keeps nothing."""
        saved = SavedHistory(
            bad_steps=self.num_bad,
            bad_in_a_row=self.bad_in_a_row,
            left_out=self.left_out,
            losses=tuple(self.losses),
            norms=tuple(self.norms),
        )
        return None if saved == SavedHistory() else saved

    def restore(self, saved: SavedHistory | None, num_skipped: int) -> None:
        """Take over the history of a checkpoint."""
        saved = saved or SavedHistory()
        self.num_skipped, self.num_bad, self.bad_in_a_row = num_skipped, saved.bad_steps, saved.bad_in_a_row
        self.left_out = saved.left_out
        self.losses.clear()
        self.norms.clear()
        if self.config.spike_z_score is not None:
            self._remember(saved.losses, saved.norms)

    def _remember(self, losses: Sequence[float], norms: Sequence[float]) -> None:
        for kept, new in ((self.losses, losses), (self.norms, norms)):
            kept.extend(new)
            while len(kept) > self.config.window:
                kept.popleft()


def robust_z_score(value: float, ordinary: Sequence[float]) -> float:
    """Return how many standard deviations `value` is above the median of `ordinary`.

    The estimate of the standard deviation is robust against outliers in `ordinary`.

    Source: Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993).
    """
    middle = median(ordinary)
    deviation = MAD_TO_DEVIATION * median(abs(one - middle) for one in ordinary)
    return (value - middle) / max(deviation, LEAST_DEVIATION * abs(middle), sys.float_info.min)


def name_samples(sample_ids: np.ndarray | Sequence[int]) -> str:
    """Return the first samples of a batch as text for a message."""
    return ", ".join(str(int(sample)) for sample in sample_ids[:SAMPLES_NAMED]) + (
        ", ..." if len(sample_ids) > SAMPLES_NAMED else ""
    )
