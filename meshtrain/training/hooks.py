"""What a run tells while it trains: metrics.jsonl, TensorBoard and the screen are hooks, and so are a user's own.

All hooks get the same calls in the same order, the built-in ones first, on every rank.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from meshtrain.checkpoint.saver import Saved
from meshtrain.config.arguments import described, wrong
from meshtrain.config.problems import did_you_mean
from meshtrain.config.run import RunConfig
from meshtrain.errors import ConfigError
from meshtrain.runtime.agreement import is_first_rank
from meshtrain.runtime.signals import StopRequest
from meshtrain.training.state import TrainState

Metrics = Mapping[str, float]
"""Name -> number, under the names of metrics.jsonl: seconds, bytes, nats per token."""
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(kw_only=True)
class RunState(TrainState):
    """What a hook is given of a run: its model, optimizer, step and values, and where the run is.

    The model is the part of it on this rank, as `meshtrain.parallel.pipeline.Pipeline`; the public functions take it as
    what `parallelize` returns, so that `save_checkpoint(directory, state)` works as in a loop of one's own.

    Of `values` a hook may keep what is to survive a restart, the same on all ranks; it is in the next checkpoint, and
    back before `on_start` of the run that goes on from it.

    Attributes:
        config: of the run, resolved, in words.
        num_steps: optimizer steps when the run is done.
        unigram_entropy: of the text, in nats: what a model reaches that knows token frequencies only.
        epoch_ends: whether the step that `on_step` tells of is the last one of its epoch, or of the run.
        note: what is no row of numbers. At the start: the checksum of the parameters, or the bad step that the run was
            rewound for. At a step that was bad and skipped: what was wrong with it.
        saved: the checkpoint that `on_checkpoint` tells of; None while it is still being written in the background.
        stopped_by: at the end: who asked to stop; None if all steps are done.
        failure: at the end: what training failed with.
        problem: why all ranks have to stop.
        stop: the requests to stop of this process.
    """

    config: RunConfig
    num_steps: int
    unigram_entropy: float
    stop: StopRequest
    epoch_ends: bool = False
    note: Mapping[str, Any] = field(default_factory=dict)
    saved: Saved | None = None
    stopped_by: str | None = None
    failure: BaseException | None = None
    problem: str | None = None

    @property
    def is_first_rank(self) -> bool:
        """Whether this is the rank that does what is done once: writes a file, sends a message."""
        return is_first_rank()

    def request_stop(self) -> None:
        """Ask all ranks to save and to end, as SIGUSR1 would; one rank is enough.

        From `on_evaluation` and `on_checkpoint` they end at once, from `on_step` and `on_start` after the next step.
        """
        self.stop.ask()

    def report_problem(self, problem: str) -> None:
        """Say in a line why training cannot go on, such as a full disk: all ranks stop with it, after the next step.

        Args:
            problem: what was found, and what to do.
        """
        self.problem = self.problem or problem


class Hook:
    """Is told what a run does; subclass it, and override what you want to hear of.

    Every rank has its own object, and calls it at the same moments: use `state.is_first_rank` for what is done once.
    The methods may read everything, the parameters in `state.model.named_parameters()` included (DTensors, where they
    are split), and call collectives, if every rank does. They must not change parameters, gradients or the optimizer,
    nor the global random state, and what they take is time of the step. An exception is a bug: it ends all ranks.

    Source: the hooks of Colossal-AI's trainer, transformers.TrainerCallback.
    """

    def on_start(self, state: RunState, metrics: Metrics) -> None:
        """Training begins after `state.step` steps: at the start, after a resume, and again after a rewind.

        What was told of later steps before does not count any more. There are no metrics yet; see `state.note`.
        """

    def on_step(self, state: RunState, metrics: Metrics) -> None:
        """`state.step` optimizer steps are done; the metrics are those of the last one, over all ranks."""

    def on_evaluation(self, state: RunState, metrics: Metrics) -> None:
        """The model was evaluated after `state.step` steps: `eval_loss`, in nats per token."""

    def on_checkpoint(self, state: RunState, metrics: Metrics) -> None:
        """A checkpoint lies at `state.saved.directory`, that of `state.saved.step`.

        In the background there is a call before, when training goes on and it is still being written: `state.saved` is
        None then.
        """

    def on_end(self, state: RunState, metrics: Metrics) -> None:
        """Nothing more will come: all steps are done, or see `state.stopped_by` and `state.failure`.

        After a failure the other ranks may not be there: no collectives then. The metrics are the latest of each name.
        """


MOMENTS = tuple(name for name in vars(Hook) if name.startswith("on_"))


@dataclass
class Hooks:
    """The hooks of a run, and the state that they are given."""

    state: RunState
    hooks: tuple[Hook, ...]
    _latest: dict[str, float] = field(default_factory=dict)

    def start(self, step: int, note: Mapping[str, Any]) -> None:
        """Begin after so many steps, or go back to there."""
        self._latest.clear()
        self.state.step = step
        self._tell("on_start", {}, note=note)

    def step(self, metrics: Metrics, *, epoch_ends: bool, note: Mapping[str, Any]) -> None:
        """Tell of a step."""
        self._tell("on_step", metrics, note=note, epoch_ends=epoch_ends)

    def evaluation(self, metrics: Metrics) -> None:
        """Tell of an evaluation."""
        self._tell("on_evaluation", metrics)

    def checkpoint(self, metrics: Metrics, saved: Saved | None) -> None:
        """Tell of a checkpoint."""
        self._tell("on_checkpoint", metrics, saved=saved)

    def end(self, *, stopped_by: str | None = None, failure: BaseException | None = None) -> None:
        """Tell that nothing more will come."""
        self.state.stopped_by, self.state.failure = stopped_by, failure
        self._tell("on_end", self._latest)

    def _tell(
        self,
        moment: str,
        metrics: Metrics,
        *,
        note: Mapping[str, Any] = NOTHING,
        saved: Saved | None = None,
        epoch_ends: bool = False,
    ) -> None:
        self.state.note, self.state.saved, self.state.epoch_ends = note, saved, epoch_ends
        self._latest |= metrics
        # What one hook is given, no other one can change.
        read_only = MappingProxyType(dict(metrics))
        for hook in self.hooks:
            getattr(hook, moment)(self.state, read_only)


def check_hooks(hooks: Iterable[object]) -> tuple[Hook, ...]:
    """Return the hooks.

    Raises:
        ConfigError: if one is none, or has a method that would never be called, or not as it is written.
    """
    if not isinstance(hooks, Iterable):
        raise wrong("hooks", hooks, "a list of them, such as [hook]")
    found = tuple(hooks)
    for index, hook in enumerate(found):
        if not isinstance(hook, Hook):
            raise wrong(f"hooks[{index}]", hook, "an object of a subclass of meshtrain.Hook")
        _check_methods(hook)
    return tuple(hook for hook in found if isinstance(hook, Hook))


def _check_methods(hook: Hook) -> None:
    name_of_hook = type(hook).__name__
    # What comes from a class beside Hook is for others to call.
    own = {name for kind in type(hook).__mro__ if issubclass(kind, Hook) for name in vars(kind)}
    for name in sorted(own):
        if name.startswith("on_") and name not in MOMENTS:
            hint = did_you_mean(name, MOMENTS, "there are")
            raise ConfigError(f"{name_of_hook}.{name} would never be called, a hook has no such method{hint}")
    for name in MOMENTS:
        if not _takes_state_and_metrics(getattr(hook, name)):
            raise ConfigError(
                f"{name_of_hook}.{name} cannot be called with a state and metrics, it is "
                f"{_written(getattr(hook, name))}; write def {name}(self, state, metrics)"
            )


def _takes_state_and_metrics(method: object) -> bool:
    # What is awaited by nobody does nothing.
    if not callable(method) or inspect.iscoroutinefunction(method):
        return False
    try:
        inspect.signature(method).bind(None, None)
    except TypeError:
        return False
    return True


def _written(method: object) -> str:
    if not callable(method):
        return described(method)
    kind = "async def" if inspect.iscoroutinefunction(method) else "def"
    return f"{kind} {getattr(method, '__name__', type(method).__name__)}{inspect.signature(method)}"
