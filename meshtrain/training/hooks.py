"""Hooks receive the events of a run. metrics.jsonl, TensorBoard and the screen are built-in hooks.

A user can add more. All hooks get the same calls in the same order, the built-in ones first, on
every rank.
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
from meshtrain.errors import ConfigError, Problem
from meshtrain.runtime.agreement import is_first_rank
from meshtrain.runtime.signals import StopRequest
from meshtrain.training.state import TrainState

Metrics = Mapping[str, float]
"""Name -> number, with the names of metrics.jsonl, in seconds, bytes or nats per token."""
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(kw_only=True)
class RunState(TrainState):
    """State of a run that is passed to hooks: model, optimizer, step, values and progress.

    The model is the part on this rank, as a `meshtrain.parallel.pipeline.Pipeline`. The public
    functions accept it like the result of `parallelize`, so `save_checkpoint(directory, state)`
    works as in a loop of your own.

    A hook may keep in `values` what must survive a restart, the same on all ranks. It is part of
    the next checkpoint, and is restored before `on_start` of the run that resumes from it.

    Attributes:
        config: the configuration of the run, with its resolved plan.
        num_steps: number of optimizer steps when the run is done.
        unigram_entropy: entropy of the token frequencies of the text, in nats. A model that knows
            nothing else reaches this loss.
        epoch_ends: whether the step of `on_step` is the last one of its epoch, or of the run.
        note: information that is not a metric. At the start: the checksum of the parameters, or the
            bad step that the run was rewound for. At a bad step that was skipped: what was wrong.
            At scores: the texts of `[generate]`.
        saved: the checkpoint of `on_checkpoint`; None while it is still being written in the
            background.
        stopped_by: at the end: what asked to stop; None if all steps are done.
        failure: at the end: the exception that ended training.
        problem: why all ranks have to stop.
        stop: the requests to stop that this process received.
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
    problem: Problem | None = None

    @property
    def is_first_rank(self) -> bool:
        """Return whether this rank does what is done once: write a file, send a message."""
        return is_first_rank()

    def request_stop(self) -> None:
        """Ask all ranks to save and to end, as SIGUSR1 does. A request on one rank is enough.

        After a request from `on_evaluation` or `on_checkpoint` they end at once. After a request
        from `on_step` or `on_start` they end after the next step.
        """
        self.stop.ask()

    def report_problem(self, problem: str | Problem, advice: str = "") -> None:
        """Report why training cannot continue, such as a full disk.

        All ranks stop after the next step.

        Args:
            problem: what was found, in one line.
            advice: what to do about it. A Problem brings its own.
        """
        found = Problem(problem, advice) if isinstance(problem, str) else problem
        self.problem = self.problem or found


class Hook:
    """Base class of objects that receive the events of a run. Override the methods that you need.

    Every rank has its own object and calls it at the same moments. Use `state.is_first_rank` for
    what is done once.

    The methods may read everything, including the parameters in `state.model.named_parameters()`,
    which are DTensors where they are split. They may call collectives if every rank does. They must
    not change parameters, gradients, the optimizer or the global random state. Training waits while
    they run. An exception is a bug: it ends all ranks.

    Source: the hooks of Colossal-AI's trainer, transformers.TrainerCallback.
    """

    def on_start(self, state: RunState, metrics: Metrics) -> None:
        """Handle the start of training: at the beginning, after a resume, and again after a rewind.

        `state.step` steps are done. Discard what earlier calls reported about later steps. There
        are no metrics yet; see `state.note`.
        """

    def on_step(self, state: RunState, metrics: Metrics) -> None:
        """Handle a finished step. The metrics are those of step `state.step`, over all ranks."""

    def on_evaluation(self, state: RunState, metrics: Metrics) -> None:
        """Handle an evaluation after `state.step` steps: `eval_loss`, in nats per token."""

    def on_scores(self, state: RunState, metrics: Metrics) -> None:
        """Handle scores of `[tasks]`, or texts of `[generate]`, after `state.step` steps.

        The metrics are the scores, `tasks/NAME/METRIC`. The texts are in `state.note`.
        """

    def on_checkpoint(self, state: RunState, metrics: Metrics) -> None:
        """Handle a checkpoint of step `state.saved.step`, stored in `state.saved.directory`.

        If it is saved in the background, there is an additional call earlier: training continues
        and the checkpoint is still being written. `state.saved` is None then.
        """

    def on_end(self, state: RunState, metrics: Metrics) -> None:
        """Handle the end: all steps are done, or see `state.stopped_by` and `state.failure`.

        No other call follows. After a failure the other ranks may be gone, so do not call
        collectives then. The metrics are the latest of each name.
        """


MOMENTS = tuple(name for name in vars(Hook) if name.startswith("on_"))


@dataclass
class Hooks:
    """The hooks of a run, and the state that is passed to them."""

    state: RunState
    hooks: tuple[Hook, ...]
    _latest: dict[str, float] = field(default_factory=dict)

    def start(self, step: int, note: Mapping[str, Any]) -> None:
        """Notify the hooks that training begins after `step` steps, or goes back to there."""
        self._latest.clear()
        self.state.step = step
        self._notify("on_start", {}, note=note)

    def step(self, metrics: Metrics, *, epoch_ends: bool, note: Mapping[str, Any]) -> None:
        """Notify the hooks of a step."""
        self._notify("on_step", metrics, note=note, epoch_ends=epoch_ends)

    def evaluation(self, metrics: Metrics) -> None:
        """Notify the hooks of an evaluation."""
        self._notify("on_evaluation", metrics)

    def scores(self, metrics: Metrics, note: Mapping[str, Any]) -> None:
        """Notify the hooks of scores of tasks, or of generated texts."""
        self._notify("on_scores", metrics, note=note)

    def checkpoint(self, metrics: Metrics, saved: Saved | None) -> None:
        """Notify the hooks of a checkpoint."""
        self._notify("on_checkpoint", metrics, saved=saved)

    def end(self, *, stopped_by: str | None = None, failure: BaseException | None = None) -> None:
        """Notify the hooks that the run ends."""
        self.state.stopped_by, self.state.failure = stopped_by, failure
        self._notify("on_end", self._latest)

    def _notify(
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
        # It is read-only, so that no hook can change what another one receives.
        read_only = MappingProxyType(dict(metrics))
        for hook in self.hooks:
            getattr(hook, moment)(self.state, read_only)


def check_hooks(hooks: Iterable[object]) -> tuple[Hook, ...]:
    """Return the hooks as a tuple.

    Raises:
        ConfigError: if an object is not a hook, or has a method that would never be called or that
            takes other arguments.
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
    # Methods of base classes that are not hooks are called by other code.
    own = {name for kind in type(hook).__mro__ if issubclass(kind, Hook) for name in vars(kind)}
    for name in sorted(own):
        if name.startswith("on_") and name not in MOMENTS:
            hint = did_you_mean(name, MOMENTS, "there are")
            raise ConfigError(f"{name_of_hook}.{name} would never be called, because a hook has no such method", hint)
    for name in MOMENTS:
        if not _takes_state_and_metrics(getattr(hook, name)):
            raise ConfigError(
                f"{name_of_hook}.{name} cannot be called with a state and metrics: it is "
                f"{_written(getattr(hook, name))}",
                f"write def {name}(self, state, metrics)",
            )


def _takes_state_and_metrics(method: object) -> bool:
    # A coroutine would never be awaited, and would do nothing.
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
