"""Run a function on several ranks of this machine, with real processes and a real gloo group.

One fork server imports torch and transformers once, which takes seconds. A rank is a fork of the
server, which takes milliseconds. Every call uses new forks, so that a rank may be killed and
nothing leaks from one call to the next.
"""

import gc
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from meshtrain.runtime.failure import has_echo
from meshtrain.runtime.fork_server import CONTEXT
from meshtrain.runtime.host_memory import keep_freed_memory
from meshtrain.runtime.lifetime import die_with_parent
from meshtrain.runtime.signals import report_crashes


@contextmanager
def program_hidden() -> Iterator[None]:
    """Keep the ranks from running the program: Python imports it in new processes."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


class RankError(AssertionError):
    """Raised when a function fails on a rank.

    `original` is the exception of the function, if it could be pickled.
    """

    def __init__(self, rank: int, trace: str, original: BaseException | None) -> None:
        super().__init__(f"rank {rank}:\n{trace}")
        self.rank, self.original = rank, original


def _send(pipe: Connection, *, value: Any = None, failure: tuple[str, BaseException | None] | None = None) -> None:
    # Values are pickled here, because multiprocessing would share the memory of tensors with a
    # process that is about to end.
    pipe.send_bytes(pickle.dumps((value, failure)))


def _run_rank(environment: dict[str, str], joins: bool, pipe: Connection, fn: Callable, args: tuple) -> None:
    # The fork server ends with the process that started it, even if that is killed.
    die_with_parent()
    os.environ.update(environment)
    report_crashes()
    keep_freed_memory()
    # Objects that the fork server has imported are kept out of garbage collection. Collecting them
    # would copy their pages, which takes a tenth of a second each time.
    gc.freeze()
    try:
        torch.set_num_threads(1)
        if joins:
            dist.init_process_group("gloo")
        _send(pipe, value=fn(*args))
        if joins:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001 - carried to the caller, whatever it is
        try:
            original = pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - an exception that cannot travel still has its trace
            original = None
        _send(pipe, failure=(traceback.format_exc(), original))
        pipe.close()
        os._exit(1)


def run_on_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, joins: bool = True, timeout: float = 120.0
) -> list[Any]:
    """Call `fn(*args)` on every rank, and return the results in rank order.

    Args:
        world_size: number of processes.
        fn: a module-level function.
        args: must be picklable.
        joins: whether the default process group is initialized before `fn`. Otherwise `fn` finds
            torchrun's environment variables, and may join a group itself, once.
        timeout: seconds after which the ranks are killed.

    Raises:
        RankError: of the first rank that raised, with its traceback.
    """
    # The store is hosted outside the ranks, as torchrun does it.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    environments = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    return _collect(environments, joins, fn, args, timeout)


def _collect(environments: list[dict[str, str]], joins: bool, fn: Callable, args: tuple, timeout: float) -> list[Any]:
    world_size = len(environments)
    pipes, processes = [], []
    for environment in environments:
        receiver, sender = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_run_rank, args=(environment, joins, sender, fn, args), daemon=True)
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results: dict[int, Any] = {}
    failures: list[RankError] = []
    try:
        while len(results) + len(failures) < world_size:
            seen = {*results, *(failure.rank for failure in failures)}
            waited_for = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in seen}
            ready = wait(waited_for, 2.0 if failures else timeout)
            if not ready and failures:
                break
            if not ready:
                waiting = sorted(set(range(world_size)) - seen)
                raise RankError(waiting[0], f"no answer from ranks {waiting} within {timeout} s", None)
            for pipe, rank in waited_for.items():
                if pipe not in ready:
                    continue
                try:
                    results[rank] = _receive(rank, pipe, processes[rank])
                except RankError as failure:
                    failures.append(failure)
        if failures:
            # A rank that lost its peer only echoes the cause, so other failures come first.
            raise min(failures, key=lambda failure: has_echo(str(failure)))
        for process in processes:
            process.join(timeout)
        return [results[rank] for rank in range(world_size)]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()


def _receive(rank: int, pipe: Connection, process: Any) -> Any:
    try:
        value, failure = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(10)
        code = process.exitcode
        end = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        raise RankError(rank, f"ended without an answer, {end}", None) from None
    if failure is not None:
        raise RankError(rank, *failure)
    return value
