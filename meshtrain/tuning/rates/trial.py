"""A short run whose learning rate grows by the same factor in each step."""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from meshtrain.config.batch_ramp import NO_RAMP
from meshtrain.config.ema import NO_EMA
from meshtrain.config.evaluation import GenerateConfig, TasksConfig
from meshtrain.config.optimizer import GroupConfig, LearningRateConfig
from meshtrain.config.run import BadStepsConfig, CheckpointConfig, EvaluationConfig, ProfileConfig, RunConfig
from meshtrain.training.hooks import Hook, Metrics, RunState
from meshtrain.tuning.rates.proposal import Trial

STOP_FACTOR = 1.5
"""The trial ends when the mean of the latest losses is this many times the lowest such mean."""
PARTS = 25
"""Length of the mean: this fraction of the steps."""


@dataclass(frozen=True)
class Bounds:
    """The learning rates to try, and the number of steps for them."""

    lowest: float
    highest: float
    steps: int


def trial_config(config: RunConfig, bounds: Bounds) -> RunConfig:
    """Return the run of a trial. It keeps data, model, batch, optimizer and plan of a run.

    Rates of groups of parameters, and that of AdamW beside Muon, keep their ratio to that of the
    rest.
    """
    optimizer = config.optimizer
    ratio = bounds.highest / optimizer.learning_rate
    groups = [_scaled(group, ratio) for group in optimizer.groups]
    adamw = None if optimizer.adamw_learning_rate is None else optimizer.adamw_learning_rate * ratio
    return config.model_copy(
        update={
            "run_directory": str(scratch_directory(config)),
            "steps": bounds.steps,
            "epochs": None,
            "batch_ramp": NO_RAMP,
            "machine": "none",
            "optimizer": optimizer.model_copy(
                update={"learning_rate": bounds.highest, "adamw_learning_rate": adamw, "groups": groups}
            ),
            "learning_rate": LearningRateConfig(name="exponential", arguments={"lr_start": bounds.lowest}),
            # Of validation data there is no use here.
            "evaluation": EvaluationConfig(max_batches=1),
            "checkpoint": CheckpointConfig(keep=0),
            "tasks": TasksConfig(),
            "generate": GenerateConfig(),
            "ema": NO_EMA,
            "logging": config.logging.model_copy(update={"trackers": [], "noise_scale_every": None}),
            # A loss that is not finite ends the trial, and is no failure.
            "bad_steps": BadStepsConfig(policy="skip", max_skips=bounds.steps),
            "profile": ProfileConfig(),
        }
    )


def _scaled(group: GroupConfig, ratio: float) -> GroupConfig:
    rate = group.learning_rate
    return group if rate is None else group.model_copy(update={"learning_rate": rate * ratio})


def scratch_directory(config: RunConfig) -> Path:
    """Return the run directory of a trial, which all machines see. It is removed at the end."""
    directory = Path(config.run_directory)
    return directory.with_name(f"{directory.name}.learning-rate")


def remove_scratch(config: RunConfig) -> None:
    """Remove the run directory of a trial, if there is one."""
    directory = scratch_directory(config)
    if directory.is_dir():
        shutil.rmtree(directory)


class TrialHook(Hook):
    """Keeps rate and loss of each step, and ends the run when the loss is far above its lowest.

    Attributes:
        trial: what was found so far.
        is_enough: whether the loss is that high.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.trial = Trial([], [])
        self.is_enough = False
        self._length = max(1, bounds.steps // PARTS)
        self._lowest = math.inf

    def on_step(self, state: RunState, metrics: Metrics) -> None:
        """Keep the step, and decide whether it was the last one."""
        if self.is_enough:
            # A request to stop is followed by one more step.
            return
        if not math.isfinite(metrics["loss"]) and not state.note:
            # Not a bad step: float16 has overflowed, and a lower loss scale follows.
            return
        self.trial.rates.append(metrics["learning_rate"])
        self.trial.losses.append(metrics["loss"])
        latest = self.trial.losses[-self._length :]
        mean = sum(latest) / len(latest)
        self._lowest = min(self._lowest, mean)
        # Also if it is not a number.
        self.is_enough = not mean <= STOP_FACTOR * self._lowest
        if self.is_enough:
            state.request_stop()
