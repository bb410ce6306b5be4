"""Run a function on several ranks: real processes, a real gloo group.

One fork server for the whole session imports torch and transformers once (seconds); a rank is then a fork of it
(milliseconds), fresh for every call, so that a rank may be killed and no state leaks from test to test.
"""

import multiprocessing
import os
import pickle
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


def _be_rank(environment: dict[str, str], joins: bool, pipe: Connection, fn: Callable, args: tuple) -> None:
    import torch.distributed

    os.environ.update(environment)
    try:
        torch.set_num_threads(1)
        if joins:
            torch.distributed.init_process_group("gloo")
        _send(pipe, value=fn(*args))
        if joins:
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


def run_on_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, joins: bool = True, timeout: float = 120.0
) -> list[Any]:
    """Call `fn(*args)` on every rank and return the results in rank order.

    Args:
        world_size: number of processes.
        fn: a module-level function.
        args: must be picklable.
        joins: whether `fn` finds the default process group initialised; otherwise it finds what torchrun gives it, to
            join a group itself, once.
        timeout: seconds after which the ranks are killed.

    Raises:
        RankError: of the first rank that raised, with its traceback.
    """
    from torch.distributed import TCPStore

    # As torchrun does it: the store lives outside of the ranks.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
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
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_be_rank, args=(environment, joins, sender, fn, args), daemon=True)
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
