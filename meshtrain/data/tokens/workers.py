"""Workers: processes that encode, so that all cores are used while this process reads and writes.

Each worker is a plain process with a socket. A pool of multiprocessing is not used: a fork would
inherit broken threads of torch and tokenizers, a spawn would import the main module of the caller,
and both outlive a parent that is killed. The threads of tokenizers are not used either: they share
a cache behind a lock, and wait for the interpreter.
"""

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import meshtrain
from meshtrain.data.text.chunks import Chunk
from meshtrain.data.tokens.encoding import EncodedBlock, Task
from meshtrain.errors import DataError

BLOCK_BYTES = 1 << 21
"""The size of the blocks that a worker receives."""

MAX_WORKERS = 64
"""One process reads and writes for all workers. It needs about 3 ms per MB, and a worker 250 ms."""

BLOCKS_AHEAD = 2
"""Blocks per worker that are read or encoded, and not written yet."""

TextBlock = list[Chunk]


def num_cores() -> int:
    """Return the number of cores that this process may use, at most MAX_WORKERS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_WORKERS)


def group_into_blocks(chunks: Iterable[Chunk]) -> Iterator[TextBlock]:
    """Group chunks into blocks of about BLOCK_BYTES.

    Raises:
        DataError: what `chunks` raises, after the blocks of all chunks before it.
    """
    block: TextBlock = []
    num_bytes = 0
    failure = None
    try:
        for chunk in chunks:
            block.append(chunk)
            num_bytes += len(chunk.data)
            # A block never ends with damage: a job that resumed there would read the damage again.
            if num_bytes >= BLOCK_BYTES and chunk.kind != "damage":
                yield block
                block, num_bytes = [], 0
    except DataError as error:
        failure = error
    if block:
        yield block
    if failure:
        raise failure


def encode_blocks(
    blocks: Iterable[TextBlock], task: Task, num_workers: int
) -> Iterator[tuple[TextBlock, EncodedBlock]]:
    """Encode blocks in their order.

    Args:
        num_workers: number of processes to start; 0: this process encodes.

    Raises:
        DataError: what reading `blocks` raises, after all blocks before it; or if a worker died.
    """
    with ExitStack() as stack:
        encode: Callable[[TextBlock], EncodedBlock]
        if num_workers == 0:
            encode = task.build().encode
            yield from ((block, encode(block)) for block in blocks)
            return
        encode = stack.enter_context(_workers(task, num_workers))
        pool = ThreadPoolExecutor(num_workers)
        stack.callback(pool.shutdown, cancel_futures=True)
        yield from _in_order(blocks, lambda block: pool.submit(encode, block), num_workers * BLOCKS_AHEAD)


def _in_order(
    blocks: Iterable[TextBlock], submit: Callable[[TextBlock], Future[EncodedBlock]], most: int
) -> Iterator[tuple[TextBlock, EncodedBlock]]:
    pending: deque[tuple[TextBlock, Future[EncodedBlock]]] = deque()
    failure = None
    try:
        for block in blocks:
            pending.append((_without_data(block), submit(block)))
            if len(pending) >= most:
                done, encoded = pending.popleft()
                yield done, encoded.result()
    except DataError as error:
        failure = error
    for done, encoded in pending:
        yield done, encoded.result()
    if failure:
        raise failure


def _without_data(block: TextBlock) -> TextBlock:
    return [chunk._replace(data=b"") for chunk in block]


@contextmanager
def _workers(task: Task, count: int) -> Iterator[Callable[[TextBlock], EncodedBlock]]:
    """Start workers, and yield a function that lets an idle one encode a block.

    The function may be called in as many threads as there are workers.
    """
    idle: SimpleQueue[tuple[subprocess.Popen, Connection]] = SimpleQueue()

    def encode(block: TextBlock) -> EncodedBlock:
        process, connection = idle.get()
        try:
            connection.send_bytes(pickle.dumps(block, protocol=5))
            return pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise DataError(
                f"a tokenizing process ended (exit code {process.wait()})",
                "if this machine was short of memory, use fewer (--workers); start again: finished work is kept",
            ) from error
        finally:
            idle.put((process, connection))

    with ExitStack() as stack:
        for _ in range(count):
            process, connection = _start(task)
            stack.callback(process.wait)
            stack.callback(connection.close)
            idle.put((process, connection))
        yield encode


def _start(task: Task) -> tuple[subprocess.Popen, Connection]:
    ours, theirs = Pipe()
    paths = [str(Path(meshtrain.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "meshtrain.data.tokens.encoding_worker", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    theirs.close()
    ours.send_bytes(pickle.dumps(task, protocol=5))
    return process, ours
