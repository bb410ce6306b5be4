"""What a run remembers of its steps: which changed nothing, which were bad, and what is ordinary.

A step is bad if its loss or gradient norm is not finite or, where `bad_steps.spike_z_score` asks for it, far above
those of the steps before. A float16 overflow that a lower loss scale can answer is skipped, but it is not bad.
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
"""The standard deviation is taken to be at least this fraction of the median: nothing is constant but by chance."""
SAMPLES_NAMED = 16


@dataclass(frozen=True)
class BadStep:
    """A step from which nothing was learned.

    Attributes:
        step: counted from 1.
        data_step: the place of its batch in the data, counted from 0.
        sample_ids: of the global batch.
        fault: what is wrong with it.
    """

    step: int
    data_step: int
    sample_ids: np.ndarray
    fault: str

    def note(self, answer: str, how_often: int) -> dict[str, object]:
        """Return an object for metrics.jsonl."""
        samples = self.sample_ids.tolist()
        return {"bad_step": self.step, "fault": self.fault, "samples": samples, "answer": answer, "times": how_often}


@dataclass
class StepHistory:
    """What must be known of the steps so far to go on; all of it survives a restart.

    As in Megatron-LM, the data goes on after a step that is skipped, but the step counts for nothing else: neither the
    schedule of the learning rate nor AdamW's bias correction moves on, so both are functions of `step - num_skipped`.

    Attributes:
        num_skipped: steps that changed nothing: they were bad, or overflowed in float16.
        num_bad: those of them that were bad.
        bad_in_a_row: bad steps since the last good one.
        left_out: places in the data of the batches that rewinds have left out, ascending.
        losses: of the latest good steps, while there is a watch for spikes.
        norms: likewise.
    """

    config: BadStepsConfig = field(default_factory=BadStepsConfig)
    num_skipped: int = 0
    num_bad: int = 0
    bad_in_a_row: int = 0
    left_out: tuple[int, ...] = ()
    losses: deque[float] = field(default_factory=deque)
    norms: deque[float] = field(default_factory=deque)

    def fault(self, loss: float, norm: float) -> str | None:
        """Say what is wrong with a step; nothing if it is good."""
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
        """Check that the run may go on after a bad step.

        Raises:
            TrainingStopped: if it shall stop at once, or has met too many.
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
            f"checkpoint are as they were. Samples of this step: {name_samples(sample_ids)}. Look at them, lower "
            f"optimizer.learning_rate, set optimizer.max_gradient_norm, or {way}"
        )

    def add(self, loss: float, norm: float, *, is_bad: bool, is_skipped: bool) -> None:
        """Move on by one step."""
        self.num_skipped += is_skipped
        self.num_bad += is_bad
        if is_bad:
            self.bad_in_a_row += 1
        elif not is_skipped:
            self.bad_in_a_row = 0
        if self.config.spike_z_score is not None and not is_skipped:
            self._remember([loss], [norm])

    def metrics(self) -> dict[str, float]:
        """Return how many steps were bad so far; nothing if the first would end the run."""
        return {} if self.config.policy == "stop" else {"bad_steps": self.num_bad + len(self.left_out)}

    def saved(self) -> SavedHistory | None:
        """Return what a checkpoint keeps beside `num_skipped`; None if there is nothing to tell."""
        saved = SavedHistory(
            bad_steps=self.num_bad,
            bad_in_a_row=self.bad_in_a_row,
            left_out=self.left_out,
            losses=tuple(self.losses),
            norms=tuple(self.norms),
        )
        return None if saved == SavedHistory() else saved

    def restore(self, saved: SavedHistory | None, num_skipped: int) -> None:
        """Go on from a checkpoint."""
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
    """Return how many standard deviations `value` is above the median of `ordinary`, with outliers among these.

    Source: Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993).
    """
    middle = median(ordinary)
    deviation = MAD_TO_DEVIATION * median(abs(one - middle) for one in ordinary)
    return (value - middle) / max(deviation, LEAST_DEVIATION * abs(middle), sys.float_info.min)


def name_samples(sample_ids: np.ndarray | Sequence[int]) -> str:
    """Name the first samples of a batch for a message."""
    return ", ".join(str(int(sample)) for sample in sample_ids[:SAMPLES_NAMED]) + (
        ", ..." if len(sample_ids) > SAMPLES_NAMED else ""
    )
