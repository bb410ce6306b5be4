"""Run a function on several ranks: real processes, a real gloo group.

One fork server for the whole session imports torch and transformers once (seconds); a rank is then a fork of it
(milliseconds), fresh for every call, so that a rank may be killed and no state leaks from test to test.
"""

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.auto.modeling_auto",
]

ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")

# DETAIL compares the fingerprint of every collective between ranks: a mismatch is an error and not garbage or a hang.
# torch reads it when it is imported, so it must be set before the fork server starts; a benchmark sets it to OFF.
os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
os.environ.update({"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOAD)


class RankError(AssertionError):
    """A function raised on a rank; `original` is its exception, where it could be carried over."""

    def __init__(self, rank: int, trace: str, original: BaseException | None) -> None:
        super().__init__(f"rank {rank}:\n{trace}")
        self.rank, self.original = rank, original


def _send(pipe: Connection, *, value: Any = None, failure: tuple[str, BaseException | None] | None = None) -> None:
    # By value: multiprocessing would share the memory of tensors with a process that is about to end.
    pipe.send_bytes(pickle.dumps((value, failure)))


def _be_rank(rank: int, world_size: int, store: str, pipe: Connection, fn: Callable, args: tuple) -> None:
    import torch.distributed

    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)})
    try:
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        _send(pipe, value=fn(*args))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException as error:  # noqa: BLE001 - carried to the test, whatever it is
        try:
            original = pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - an exception that cannot travel still has its trace
            original = None
        _send(pipe, failure=(traceback.format_exc(), original))
        pipe.close()
        os._exit(1)


def run_on_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call `fn(*args)` on every rank of a gloo group and return the results in rank order.

    Args:
        world_size: number of processes.
        fn: a module-level function; it finds the default process group initialised.
        args: must be picklable.
        timeout: seconds after which the ranks are killed.

    Raises:
        RankError: of the first rank that raised, with its traceback.
    """
    with tempfile.TemporaryDirectory() as directory:
        return _collect(world_size, fn, args, os.path.join(directory, "store"), timeout)


def _collect(world_size: int, fn: Callable, args: tuple, store: str, timeout: float) -> list[Any]:
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_be_rank, args=(rank, world_size, store, sender, fn, args), daemon=True)
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results: dict[int, Any] = {}
    failures: list[RankError] = []
    try:
        while len(results) + len(failures) < world_size:
            seen = {*results, *(failure.rank for failure in failures)}
            ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in seen], 2.0 if failures else timeout)
            if not ready and failures:
                break
            if not ready:
                waiting = sorted(set(range(world_size)) - seen)
                raise RankError(waiting[0], f"no answer from ranks {waiting} within {timeout} s", None)
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    results[rank] = _receive(rank, pipe, processes[rank])
                except RankError as failure:
                    failures.append(failure)
        if failures:
            # A rank that lost its peer only echoes the cause.
            raise min(failures, key=lambda failure: any(echo in str(failure) for echo in ECHOES))
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
        raise RankError(rank, f"ended without an answer, exit code {process.exitcode}", None) from None
    if failure is not None:
        raise RankError(rank, *failure)
    return value
