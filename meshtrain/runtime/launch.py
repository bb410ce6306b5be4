"""Start the processes of a run on this machine as torchrun does, and return their exit code.

The agent is torchrun's own, without its logs. Its own restarts are disabled, because it restarts
after every exit code other than 0, also after a mistake of the user. Here the exit codes decide.

`python -m meshtrain.runtime.launch ARGUMENTS` is torchrun itself, for the scripts that use several
machines. torchrun restarts as always, but its summary is left out, and its exit code is that of the
processes.
"""

import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from meshtrain import console
from meshtrain.runtime.environment import LAUNCHER
from meshtrain.runtime.exit_codes import BUG, INTERRUPTED, PEER_FAILED, RESTART, USER_MISTAKE

FORWARDED = {
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGINT: signal.SIGTERM,
}
"""Signal to this process -> signal to every worker.

After ctrl-C the workers save and stop, as after SIGTERM.
"""
FINAL = (USER_MISTAKE, INTERRUPTED, RESTART)
"""Exit codes after which the processes are not started again."""
POLL_SECONDS = 0.1


def run_workers(command: Sequence[str], processes: int, *, max_restarts: int) -> int:
    """Run a command in several processes of one run, until all of them have ended.

    Args:
        command: the program and its arguments.
        processes: number of processes.
        max_restarts: how often all processes are started again after one was lost or has failed.

    Returns:
        The exit code of the run, see `exit_code`.
    """
    logging.disable(logging.CRITICAL)
    os.environ[LAUNCHER] = "1"
    # The agent handles this signal only. All others are forwarded here.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    if processes > 1:
        # One thread per process, as in torchrun, because the processes already use all cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    run_id = str(uuid.uuid4())
    restarts = 0
    with _forwarding() as forwarder:
        while True:
            agent = _agent(command, processes, run_id)
            forwarder.agent = agent
            codes = {rank: failure.exitcode for rank, failure in agent.run().failures.items()}
            code = exit_code(codes.values(), forwarder.first)
            if code == 0 or code in FINAL or forwarder.first is not None or restarts == max_restarts:
                break
            restarts += 1
            console.warning(f"{_losses(codes) or 'a process failed'}: all start again, {restarts} of {max_restarts}")
    if code == PEER_FAILED and (losses := _losses(codes)):
        console.error_lines([losses])
    return code


def exit_code(codes: Collection[int], asked: signal.Signals | None = None) -> int:
    """Return the exit code of a run from those of its processes.

    Args:
        codes: of the processes that did not end with 0. Negative: ended by that signal.
        asked: the signal that asked the run to stop.
    """
    if RESTART in codes and asked == signal.SIGINT:
        return INTERRUPTED
    # One process may be the cause while the others only follow, so the order of codes counts.
    for code in (USER_MISTAKE, INTERRUPTED, RESTART, BUG):
        if code in codes:
            return code
    if not codes:
        return 0
    return PEER_FAILED if asked is None else 128 + asked


def _losses(codes: Mapping[int, int]) -> str:
    """Return which processes ended without being able to report why."""
    # -SIGTERM is left out, because the agent sends it to all other processes.
    lost = {rank: code for rank, code in codes.items() if code not in (BUG, PEER_FAILED, -signal.SIGTERM)}
    ways = {rank: signal.Signals(-code).name if code < 0 else f"exit code {code}" for rank, code in lost.items()}
    return ", ".join(f"rank {rank} ended with {way}" for rank, way in sorted(ways.items()))


def _agent(command: Sequence[str], processes: int, run_id: str) -> LocalElasticAgent:
    """Return an agent of torchrun, created as by `torchrun --standalone`."""
    program, *arguments = command
    rendezvous = RendezvousParameters(
        backend="c10d", endpoint="localhost:0", run_id=run_id, min_nodes=1, max_nodes=1, local_addr="localhost"
    )
    spec = WorkerSpec(
        role="default",
        local_world_size=processes,
        entrypoint=program,
        args=tuple(arguments),
        rdzv_handler=get_rendezvous_handler(rendezvous),
        max_restarts=0,
        monitor_interval=POLL_SECONDS,
        local_addr="localhost",
    )
    # Without a directory for logs, the output of the processes goes where that of this process
    # goes.
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=os.devnull))


class _Forwarder(threading.Thread):
    """Forwards the signals of this process to all workers.

    A worker that is being started receives them afterwards.
    """

    def __init__(self) -> None:
        super().__init__(name="signals", daemon=True)
        self.first: signal.Signals | None = None
        self.agent: LocalElasticAgent | None = None
        self._numbers: SimpleQueue[int | None] = SimpleQueue()
        self._is_over = threading.Event()

    def take(self, number: int, frame: object) -> None:
        """Record a signal. Python calls this in the main thread."""
        self.first = self.first or signal.Signals(number)
        self._numbers.put(number)

    def run(self) -> None:
        """Forward signals until `end` is called."""
        while (number := self._numbers.get()) is not None:
            while not (pids := self._pids()) and not self._is_over.wait(POLL_SECONDS):
                pass
            for pid in pids:
                # The process may have ended.
                with suppress(ProcessLookupError):
                    os.kill(pid, FORWARDED[signal.Signals(number)])

    def end(self) -> None:
        """Stop forwarding."""
        self._is_over.set()
        self._numbers.put(None)
        self.join()

    def _pids(self) -> list[int]:
        """Return the process ids of the workers once all of them exist, and nothing before."""
        workers = [] if self.agent is None else self.agent.get_worker_group().workers
        pids = [worker.id for worker in workers]
        return [] if None in pids else pids


@contextmanager
def _forwarding() -> Iterator[_Forwarder]:
    forwarder = _Forwarder()
    forwarder.start()
    for number in FORWARDED:
        # A signal that was ignored stays ignored, as `nohup` requires.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forwarder.take)
    try:
        yield forwarder
    finally:
        for number in FORWARDED:
            signal.signal(number, signal.SIG_IGN)
        forwarder.end()


def main() -> None:
    """Run torchrun without its logs and its summary."""
    logging.disable(logging.CRITICAL)
    try:
        torchrun.run(torchrun.parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        sys.exit(exit_code([failure.exitcode for failure in error.failures.values()]))
    except SignalException as stopped:
        # torchrun has waited for the processes, but their exit codes are lost.
        sys.exit(128 + stopped.sigval)


if __name__ == "__main__":
    main()
