"""Workers: processes that encode, so that every core is busy while this one reads and writes.

Plain processes with a socket each, not a pool of multiprocessing: a fork would inherit the threads of torch and
tokenizers as ruins, a spawn would import the main module of whoever called, and either outlives a parent that is
killed. Processes, not the threads of tokenizers: those share a cache behind a lock and wait for the interpreter.
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
"""Sent to a worker at a time."""

MAX_WORKERS = 64
"""One process reads and writes for all: it takes about 3 ms per MB, for which a worker takes 250."""

BLOCKS_AHEAD = 2
"""Per worker: read or encoded, and not written yet."""

Block = list[Chunk]


def num_cores() -> int:
    """Return how many cores this process may use, MAX_WORKERS at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_WORKERS)


def group_into_blocks(chunks: Iterable[Chunk]) -> Iterator[Block]:
    """Gather chunks until they are worth a journey.

    Raises:
        DataError: what `chunks` raises, after all that came before it.
    """
    block: Block = []
    num_bytes = 0
    failure = None
    try:
        for chunk in chunks:
            block.append(chunk)
            num_bytes += len(chunk.data)
            # Whoever went on right behind a damage would meet it again: only what follows it leaves the file.
            if num_bytes >= BLOCK_BYTES and chunk.kind != "damage":
                yield block
                block, num_bytes = [], 0
    except DataError as error:
        failure = error
    if block:
        yield block
    if failure:
        raise failure


def encode_blocks(blocks: Iterable[Block], task: Task, num_workers: int) -> Iterator[tuple[Block, EncodedBlock]]:
    """Encode blocks in their order.

    Args:
        num_workers: processes; 0: none but this one.

    Raises:
        DataError: what reading `blocks` raises, after all blocks before; or that a worker died.
    """
    with ExitStack() as stack:
        encode: Callable[[Block], EncodedBlock]
        if num_workers == 0:
            encode = task.build().encode
            yield from ((block, encode(block)) for block in blocks)
            return
        encode = stack.enter_context(_workers(task, num_workers))
        pool = ThreadPoolExecutor(num_workers)
        stack.callback(pool.shutdown, cancel_futures=True)
        yield from _in_order(blocks, lambda block: pool.submit(encode, block), num_workers * BLOCKS_AHEAD)


def _in_order(
    blocks: Iterable[Block], submit: Callable[[Block], Future[EncodedBlock]], most: int
) -> Iterator[tuple[Block, EncodedBlock]]:
    pending: deque[tuple[Block, Future[EncodedBlock]]] = deque()
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


def _without_data(block: Block) -> Block:
    return [chunk._replace(data=b"") for chunk in block]


@contextmanager
def _workers(task: Task, count: int) -> Iterator[Callable[[Block], EncodedBlock]]:
    """Start workers; yield a function that lets an idle one encode a block, for as many threads as workers."""
    idle: SimpleQueue[tuple[subprocess.Popen, Connection]] = SimpleQueue()

    def encode(block: Block) -> EncodedBlock:
        process, connection = idle.get()
        try:
            connection.send_bytes(pickle.dumps(block, protocol=5))
            return pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise DataError(
                f"a process that tokenizes ended (exit code {process.wait()}); if this machine was short of memory, "
                "let fewer work at a time (--workers); start again: what is done is kept"
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
