"""What runs a stage: datatrove's executors, for this machine, for Slurm and for Ray.

Which tasks are done, what they counted and what they logged lies in the directory that a stage is given for it.
"""

import gc
import json
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import multiprocess
from datatrove.executor.base import PipelineExecutor
from datatrove.executor.ray import RayPipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.utils.logging import logger
from datatrove.utils.stats import PipelineStats
from multiprocess import forkserver

from meshtrain import console
from meshtrain.compat.datatrove import TaskExecutor
from meshtrain.config.corpus import CorpusConfig
from meshtrain.corpus.steps.blocks import ShardPass
from meshtrain.errors import DataError, UserError
from meshtrain.runtime.lifetime import children_die_with_parent, die_with_parent, hold_until_death

WORKERS = "workers.lock"
"""Held by workers, beside the directories of the stages: a killed run's may live for a moment longer than it does."""
POLL_SECONDS = 0.2
QUEUE_POLL_SECONDS = 10.0


class LocalExecutor(TaskExecutor):
    """datatrove's local executor, without its words on the screen and without orphans.

    A killed run must not leave workers behind: they would go on, and write beside those of the next run.
    """

    def run(self) -> None:
        """Run the tasks that are not done."""
        if self.workers > 1:
            _start_server()
        ending: KeyboardInterrupt | UserError | None = None
        with children_die_with_parent():
            try:
                super().run()
            except KeyboardInterrupt:
                ending = KeyboardInterrupt()
            except UserError as error:
                # Its traceback, and those of what it came from, hold the pool.
                ending = error.with_traceback(None)
                ending.__cause__ = ending.__context__ = None
        if ending is not None:
            # Nothing holds the pool any more: without this, a helper of Python complains of its semaphores.
            gc.collect()
            raise ending

    def run_task(self, rank: int, local_rank: int, node_rank: int) -> PipelineStats:
        """Run one task, with its output in a file, for as long as the run lives."""
        if self.workers > 1:
            die_with_parent()
            hold_until_death(Path(self.logging_dir.resolve_paths("")).parent / WORKERS)
        said = Path(self.logging_dir.resolve_paths("said"))
        said.mkdir(parents=True, exist_ok=True)
        # datatrove shows on standard error what its log files have, and what a library warns of belongs there too.
        with (said / f"task_{rank:05}.txt").open("w") as file, redirect_stderr(file):
            try:
                return super().run_task(rank, local_rank, node_rank)
            finally:
                logger.remove()


def _start_server() -> None:
    """Start the process that workers are forked from, if it does not run yet."""
    # The workers would all import the same.
    multiprocess.set_forkserver_preload(["meshtrain.corpus.preparation"])
    # Ctrl-C reaches all processes of a terminal; the one that started the others ends them.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, handler)


def run_pass(stage: ShardPass, logs: Path, config: CorpusConfig, description: str, *, is_shown: bool = True) -> None:
    """Run what is not done yet of a stage, and wait for it.

    Args:
        stage: what to run.
        logs: the directory in which datatrove keeps what it knows of this stage.
        config: the executor, and the number of workers.
        description: of the work.
        is_shown: whether progress is shown.

    Raises:
        UserError: what a task raised, or that a cluster lost a task.
    """
    # Before the first task says anything; each task adds a log file of its own.
    logger.remove()
    executor = build_executor(stage, logs, config)
    if not executor.get_incomplete_ranks(skip_completed=True):
        return
    with _progress(executor, stage, description) if is_shown else nullcontext():
        try:
            executor.run()
        except OSError as error:
            raise DataError(
                f"{description}: {error.filename or logs}: {error.strerror or error}; mend it, then run the same "
                "command again: what is done stays done"
            ) from error
        if isinstance(executor, SlurmPipelineExecutor):
            _wait_for_slurm(executor)
    if lost := executor.get_incomplete_ranks(skip_completed=True):
        raise DataError(
            f"{description}: {len(lost)} of {stage.tasks} tasks did not end, the first is {lost[0]}; see {logs}, then "
            "run the same command again: what is done stays done"
        )


def build_executor(stage: ShardPass, logs: Path, config: CorpusConfig) -> PipelineExecutor:
    """Return the executor that the configuration names.

    Raises:
        UserError: if its package or command is not there.
    """
    pipeline = list(stage.pipeline)
    if config.executor == "slurm":
        if which("sbatch") is None:
            raise UserError(
                'executor = "slurm" needs the command sbatch, which is not on this machine; start it where jobs are '
                "submitted"
            )
        assert config.slurm is not None
        words = config.slurm.model_dump(exclude_none=True)
        return SlurmPipelineExecutor(
            pipeline,
            **{"qos": None, **words},
            tasks=stage.tasks,
            workers=config.workers,
            logging_dir=str(logs),
            job_name=f"meshtrain-{stage.name}",
        )
    if config.executor == "ray":
        if find_spec("ray") is None:
            raise UserError('executor = "ray" needs a package that is not installed; run pip install "ray[default]"')
        import_module("ray").init(address=config.ray.address, ignore_reinit_error=True)
        words = config.ray.model_dump(exclude={"address"})
        return RayPipelineExecutor(pipeline, tasks=stage.tasks, workers=config.workers, logging_dir=str(logs), **words)
    workers = min(config.workers, stage.tasks)
    return LocalExecutor(pipeline, tasks=stage.tasks, workers=workers, logging_dir=str(logs))


def total_counts(logs: Path) -> Counter[str]:
    """Return what the blocks of a stage have counted, over all tasks."""
    totals: Counter[str] = Counter()
    for path in sorted((logs / "stats").glob("*.json")):
        for block in json.loads(path.read_text()):
            for label, statistic in block["stats"].items():
                totals[label] += int(statistic["total"] if isinstance(statistic, dict) else statistic)
    return totals


@contextmanager
def _progress(executor: PipelineExecutor, stage: ShardPass, description: str) -> Iterator[None]:
    """Show how many tasks are done while the caller waits for the executor, which does not say it."""
    is_over = threading.Event()

    def watch() -> None:
        done = 0
        with console.progress(description, stage.tasks, unit="shards") as advance:
            is_last = False
            while not is_last:
                is_last = is_over.wait(POLL_SECONDS)
                now = stage.tasks - len(executor.get_incomplete_ranks(skip_completed=True))
                if now > done:
                    advance(now - done)
                    done = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def _wait_for_slurm(executor: SlurmPipelineExecutor) -> None:
    while executor.get_incomplete_ranks(skip_completed=True):
        command = ["squeue", "--noheader", "--jobs", str(executor.job_id)]
        queue = subprocess.run(command, capture_output=True, text=True)
        if not queue.stdout.strip():
            # The last task may have ended between the two looks: the caller looks again.
            return
        time.sleep(QUEUE_POLL_SECONDS)
