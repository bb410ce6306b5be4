"""Executors: datatrove's executors run a pass on this machine, on Slurm or on Ray.

Each pass has a log directory. It stores which tasks are done, what they counted and what they
logged.
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
from meshtrain.errors import DataError, UserError, reason_of
from meshtrain.runtime.lifetime import children_die_with_parent, die_with_parent, hold_until_death

WORKERS = "workers.lock"
"""Lock file that workers hold, because the workers of a killed run may outlive it for a moment."""
POLL_SECONDS = 0.2
QUEUE_POLL_SECONDS = 10.0


class LocalExecutor(TaskExecutor):
    """datatrove's local executor, which here prints nothing and leaves no workers behind.

    Workers that outlive a killed run would write to the same files as those of the next run.
    """

    def run(self) -> None:
        """Run the tasks that are not done."""
        if self.workers > 1:
            _start_fork_server()
        failure: KeyboardInterrupt | UserError | None = None
        with children_die_with_parent():
            try:
                super().run()
            except KeyboardInterrupt:
                failure = KeyboardInterrupt()
            except UserError as error:
                # The tracebacks of the error and its causes keep the pool alive.
                failure = error.with_traceback(None)
                failure.__cause__ = failure.__context__ = None
        if failure is not None:
            # Nothing refers to the pool now. It is collected here, because Python's resource
            # tracker warns about leaked semaphores if the process ends with the pool.
            gc.collect()
            raise failure

    def run_task(self, rank: int, local_rank: int, node_rank: int) -> PipelineStats:
        """Run one task, with its output in a file, for as long as the run lives."""
        if self.workers > 1:
            die_with_parent()
            hold_until_death(Path(self.logging_dir.resolve_paths("")).parent / WORKERS)
        directory = Path(self.logging_dir.resolve_paths("stderr"))
        directory.mkdir(parents=True, exist_ok=True)
        # datatrove copies its log to standard error, and libraries print warnings there. The user
        # should see neither.
        with (directory / f"task_{rank:05}.txt").open("w") as file, redirect_stderr(file):
            try:
                return super().run_task(rank, local_rank, node_rank)
            finally:
                logger.remove()


def _start_fork_server() -> None:
    """Start the process from which workers are forked, if it does not run yet."""
    # The fork server imports the modules once for all workers.
    multiprocess.set_forkserver_preload(["meshtrain.corpus.preparation"])
    # Ctrl-C reaches all processes of a terminal. The fork server ignores it, because this process
    # ends the others.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, handler)


def run_pass(
    shard_pass: ShardPass, logs: Path, config: CorpusConfig, description: str, *, is_shown: bool = True
) -> None:
    """Run the unfinished tasks of a pass, and wait for them.

    Args:
        shard_pass: the pass to run.
        logs: the log directory of the pass.
        config: the executor, and the number of workers.
        description: the name of the pass for progress and errors.
        is_shown: whether progress is shown.

    Raises:
        UserError: if a task raised one, or did not end.
    """
    # The loggers are removed before the first task logs. Each task adds a log file of its own.
    logger.remove()
    executor = build_executor(shard_pass, logs, config)
    if not executor.get_incomplete_ranks(skip_completed=True):
        return
    with _progress(executor, shard_pass.tasks, description) if is_shown else nullcontext():
        try:
            executor.run()
        except OSError as error:
            raise DataError(
                f"{description}: {error.filename or logs}: {reason_of(error)}",
                "fix it, then run the same command again; finished tasks are not repeated",
            ) from error
        if isinstance(executor, SlurmPipelineExecutor):
            _wait_for_slurm(executor)
    if lost := executor.get_incomplete_ranks(skip_completed=True):
        raise DataError(
            f"{description}: {len(lost)} of {shard_pass.tasks} tasks did not end, the first is {lost[0]}",
            f"see {logs}, then run the same command again; finished tasks are not repeated",
        )


def build_executor(shard_pass: ShardPass, logs: Path, config: CorpusConfig) -> PipelineExecutor:
    """Return the executor that the configuration names.

    Raises:
        UserError: if its package or command is not installed.
    """
    pipeline = list(shard_pass.pipeline)
    if config.executor == "slurm":
        if which("sbatch") is None:
            raise UserError(
                'executor = "slurm" needs the command sbatch, which is not on this machine',
                "run it where jobs are submitted",
            )
        assert config.slurm is not None
        settings = config.slurm.model_dump(exclude_none=True)
        return SlurmPipelineExecutor(
            pipeline,
            **{"qos": None, **settings},
            tasks=shard_pass.tasks,
            workers=config.workers,
            logging_dir=str(logs),
            job_name=f"meshtrain-{shard_pass.name}",
        )
    if config.executor == "ray":
        if find_spec("ray") is None:
            raise UserError('executor = "ray" needs a package that is not installed', 'run pip install "ray[default]"')
        import_module("ray").init(address=config.ray.address, ignore_reinit_error=True)
        settings = config.ray.model_dump(exclude={"address"})
        return RayPipelineExecutor(
            pipeline, tasks=shard_pass.tasks, workers=config.workers, logging_dir=str(logs), **settings
        )
    workers = min(config.workers, shard_pass.tasks)
    return LocalExecutor(pipeline, tasks=shard_pass.tasks, workers=workers, logging_dir=str(logs))


def total_counts(logs: Path) -> Counter[str]:
    """Return the counts of the blocks of a pass, summed over all tasks."""
    totals: Counter[str] = Counter()
    for path in sorted((logs / "stats").glob("*.json")):
        for block in json.loads(path.read_text()):
            for label, statistic in block["stats"].items():
                totals[label] += int(statistic["total"] if isinstance(statistic, dict) else statistic)
    return totals


@contextmanager
def _progress(executor: PipelineExecutor, num_tasks: int, description: str) -> Iterator[None]:
    """Show the number of finished tasks.

    A thread polls it, because the executor does not report it.
    """
    is_over = threading.Event()

    def watch() -> None:
        done = 0
        with console.progress(description, num_tasks, unit="shards") as advance:
            is_last = False
            while not is_last:
                is_last = is_over.wait(POLL_SECONDS)
                now = num_tasks - len(executor.get_incomplete_ranks(skip_completed=True))
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
            # The last task may have ended between the two queries, so the caller checks again.
            return
        time.sleep(QUEUE_POLL_SECONDS)
