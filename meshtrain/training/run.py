"""A training run from its configuration to its end: resolve it, build it, train it."""

import socket
import time
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from signal import SIGTERM

from meshtrain import console
from meshtrain.config.reading import shown_path
from meshtrain.config.run import RunConfig, duration_seconds
from meshtrain.data.prepare import PreparedData, prepare_data
from meshtrain.data.samples.dataset import Dataset, build_dataset
from meshtrain.errors import ConfigError, DataError, Problem, name_some
from meshtrain.parallel.head.chunks import LossFunction
from meshtrain.runtime.activity import HangLimits
from meshtrain.runtime.agreement import failing_together, gather_objects, raise_together
from meshtrain.runtime.environment import rank_from_environment, world_size_from_environment
from meshtrain.runtime.process import (
    Process,
    check_devices,
    check_number_format,
    check_peer_memory,
    lift_timeouts,
    run_process,
)
from meshtrain.training.build import Run, build_run
from meshtrain.training.directory import check_directory, write_resolved
from meshtrain.training.distillation.frozen import with_teacher
from meshtrain.training.evaluators import Evaluator
from meshtrain.training.hooks import Hook
from meshtrain.training.identity import Identity
from meshtrain.training.lock import locked_run
from meshtrain.training.loop import run_loop
from meshtrain.training.optim import build_learning_rate
from meshtrain.training.preference.start import start_run
from meshtrain.training.report import show_run
from meshtrain.training.resolve import ResolvedRun, check_vocabulary, resolve_run
from meshtrain.training.run_checkpoints import find_checkpoint_to_resume
from meshtrain.training.self_check import check_parameters
from meshtrain.training.trackers.packages import check_trackers


class Ending(Enum):
    """How a run ends if it does not fail."""

    DONE = "all steps are done"
    ASKED = "this process, or all, should stop, and has saved"
    FOLLOWED = "another process has to go, and all have saved"


def _go_on(resolved: ResolvedRun) -> None:
    """Do nothing before the processes join."""


def train_run(
    config: RunConfig,
    hooks: Sequence[Hook] = (),
    before_joining: Callable[[ResolvedRun], None] = _go_on,
    evaluators: Sequence[Evaluator] = (),
    loss: LossFunction | None = None,
) -> Ending:
    """Train a run, or resume it from its newest checkpoint.

    Args:
        hooks: the user's hooks; on every rank they are called after the built-in ones.
        before_joining: called once the run is resolved, before the process group is joined; raises
            a UserError if the plan must not be trained.
        evaluators: evaluate the model between steps.
        loss: the program's own, which was checked; None: that of the configuration.

    Raises:
        UserError: before any process group is joined, if the mistake can be found there.
    """
    started = time.monotonic()
    check_devices()
    check_trackers(config)
    check_directory(config)
    with locked_run(config) as lock:
        resolved = resolve_run(config, world_size_from_environment())
        check_number_format(resolved.plan.precision.products)
        if resolved.plan.tensor.async_tp:
            check_peer_memory(resolved.plan.mesh.tp)
        before_joining(resolved)
        identity, dataset, num_steps = _prepare(resolved)
        for evaluator in evaluators:
            evaluator.check(resolved.hf_config, identity.data.tokenizer.directory)
        with run_process(Path(config.run_directory), HangLimits(**config.watchdog.model_dump())) as process:
            if config.stop_after is not None:
                process.stop.deadline = started + duration_seconds(config.stop_after)
            _agree_on_data(identity.data)
            found = find_checkpoint_to_resume(identity)
            show_run(resolved)
            console.line(f"{num_steps:,} steps into {shown_path(Path(config.run_directory))}")
            run = build_run(identity, dataset, num_steps, process, lock, hooks, evaluators, loss)
            run = start_run(with_teacher(run, found), found)
            checksum = _check_parameters(run)
            _write_resolved(run)
            process.guard.follow(run.pipeline.activity)
            lift_timeouts()
            return _ending(run_loop(run, checksum), process)


def _prepare(resolved: ResolvedRun) -> tuple[Identity, Dataset, int]:
    """Prepare the data of a run, as far as one process can, and check that the run fits the data.

    Returns:
        The identity of the run; the samples and their order; the number of steps.
    """
    config = resolved.config
    data = prepare_data(config.data, leads=rank_from_environment() == 0)
    check_vocabulary(data.tokenizer.vocab_size, resolved.hf_config)
    dataset = build_dataset(data, global_batch_size=config.global_batch_size, seed=config.seed, ramp=config.batch_ramp)
    num_steps = _num_steps(config, dataset)
    # This is only a check. It comes here because the text determines the number of steps.
    build_learning_rate(config.learning_rate, config.optimizer.learning_rate, num_steps)
    return Identity(resolved, data, resolved.exported_config(data.tokenizer.end_id)), dataset, num_steps


def _num_steps(config: RunConfig, dataset: Dataset) -> int:
    """Return the length of the run in optimizer steps.

    Raises:
        ConfigError: if the length is given in epochs and the data has none.
        DataError: if the data ends earlier.
    """
    if config.epochs is None:
        assert config.steps is not None
        dataset.check_steps(config.steps)
        return config.steps
    if dataset.order.steps_per_epoch is None:
        raise ConfigError(
            f"`epochs` = {config.epochs}, but a mixture has no epochs, because each source has its own", "set `steps`"
        )
    if dataset.streams:
        raise ConfigError(
            f"`epochs` = {config.epochs}, but data.streaming: the end of a stream is not known in advance",
            "set `steps`",
        )
    return config.epochs * dataset.order.steps_per_epoch


def _agree_on_data(data: PreparedData) -> None:
    """Compare the data that the processes have read. Collective.

    Raises:
        DataError: if a machine has another text, or another tokenizer, than the first process.
    """
    answers = gather_objects((socket.gethostname(), data.identity))
    others = sorted({host for host, identity in answers if identity != answers[0][1]})
    problem = Problem(
        f"the data of {name_some(others)} is not that of {answers[0][0]}: text, tokenizer or Python version differs",
        "use the same files on all machines",
    )
    raise_together([problem] if others else [], DataError)


def _check_parameters(run: Run) -> str | None:
    """Check the parameters on all ranks, and return their checksum; None without self-checks."""
    if not run.config.self_checks:
        return None
    report = check_parameters(run.pipeline)
    copies = f"; in two stages, because tied: {name_some(report.tied_copies)}" if report.tied_copies else ""
    console.line(f"Parameters checksum {report.checksum}{copies}")
    return report.checksum


def _write_resolved(run: Run) -> None:
    with failing_together(ConfigError):
        if run.process.rank == 0:
            try:
                write_resolved(run.config, run.identity.plan)
            except OSError as error:
                raise ConfigError(
                    f"cannot write into {run.config.run_directory}: {error.strerror}",
                    "free disk space, or set run_directory to another directory",
                ) from error


def _ending(reason: int, process: Process) -> Ending:
    if reason == 0:
        return Ending.DONE
    # The user ends a run with SIGUSR1. SIGTERM means that a machine must leave, or that torchrun
    # restarts with other machines. Then the remaining processes must meet again instead of ending.
    return Ending.FOLLOWED if reason == SIGTERM and not process.stop.is_asked() else Ending.ASKED
