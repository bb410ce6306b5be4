"""When one process fails, all processes stop within seconds and report the same cause.

A thread in every process polls the store twice a second. It has its own connection, because the
main thread may be blocked in a collective or in the store. If the store holds a reason to stop, the
process stops; the first reason that is written counts. The thread also writes that its process is
alive, and checks that its neighbor does the same. When its own main thread takes too long, it asks
all processes what they are doing.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from meshtrain import console
from meshtrain.errors import UserError
from meshtrain.runtime.activity import Activity, HangLimits
from meshtrain.runtime.claims import MARK
from meshtrain.runtime.exit_codes import INTERRUPTED, PEER_FAILED, USER_MISTAKE
from meshtrain.runtime.failure import (
    FAILURE_NAME,
    Failure,
    Report,
    failure_from_json,
    failure_kind,
    is_echo,
    message_of,
    trace_of,
)
from meshtrain.runtime.flight_recorder import forget_recorders, write_recorder
from meshtrain.runtime.hang import describe, hang_failure, innermost_frames, is_waiting
from meshtrain.runtime.lifetime import end_if_torchrun_ended, run_exit_functions

POLL_SECONDS = 0.5
STORE_SECONDS = 10.0
ECHO_SECONDS = 3.0
"""A process whose peer is gone waits this long for a cause, then finds out which one is missing."""
REPORTER_SECONDS = 3.0
"""A process that meets a mistake waits this long for rank 0 to meet it too and report it."""
LINGER_SECONDS = 3.0
"""The process that hosts the store waits this long for the others to read the cause."""
EXIT_SECONDS = 6.0
"""Time after which an ending process exits, even if it could not report why.

It is longer than LINGER_SECONDS.
"""
REPORT_SECONDS = 3.0
PAUSE_SECONDS = 10.0
"""If more time passes between two polls, the process and its main thread were suspended."""
SILENT_POLLS = 14
"""Polls without a new pulse after which a neighbor is gone.

Polls are counted instead of seconds, because a machine that sleeps stops both.
"""
SILENT_POLLS_WHEN_STOPPING = 6
"""Fewer polls, when this process was asked to stop.

torchrun sends SIGTERM to all others when one process is gone, and the process then waits for no
step.
"""
LOST_POLLS = 30
"""Polls that the store may take to answer.

A broken link closes no connection: the kernel takes 15 minutes to give up.
"""
EXIT_CODES = {"mistake": USER_MISTAKE, "interrupted": INTERRUPTED}

REASON, ASK = "reason", "ask"


@dataclass
class _Neighbor:
    """The process with the next rank, its last pulse, and the polls since the pulse changed."""

    rank: int
    pulse: bytes = b""
    silent_polls: int = 0


class Guard:
    """Watches this process on behalf of all others, and the others on behalf of this one.

    Args:
        store: a connection that nothing else uses.
        rank: of this process.
        world_size: number of processes.
        directory: of the run, where failure.json is written.
        limits: how long the parts of the run may take.
        hosts_store: whether the store ends with this process.
        is_stopping: returns whether this process was asked to stop.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        directory: Path,
        limits: HangLimits,
        hosts_store: bool,
        is_stopping: Callable[[], bool],
    ) -> None:
        self.activity = Activity()
        self._is_stopping = is_stopping
        self._store, self._rank, self._world_size = store, rank, world_size
        self._directory, self._limits, self._hosts_store = directory, limits, hosts_store
        self._host = socket.gethostname()
        self._is_ending = threading.Event()
        self._is_over = threading.Event()
        self._is_failing = threading.Event()
        self._pulse = 0
        self._neighbor = _Neighbor((rank + 1) % world_size)
        self._has_answered = False
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)
        store.set_timeout(timedelta(seconds=STORE_SECONDS))
        store.set(f"host/{rank}", self._host)
        self._beat()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs, and report an exception of the block to all processes."""
        self._thread.start()
        threading.Thread(target=self._watch_store, name="guard of the store", daemon=True).start()
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._is_over.set()
            self._thread.join(STORE_SECONDS)

    def follow(self, activity: Activity) -> None:
        """Use another activity for the main thread, and remove what an earlier failure left."""
        self.activity = activity
        if self._rank == 0:
            (self._directory / FAILURE_NAME).unlink(missing_ok=True)
            forget_recorders(self._directory)

    def expect_end(self) -> None:
        """Stop treating a lost store as a failure: the block is about to end well on all ranks."""
        self._is_ending.set()

    def _fail(self, error: BaseException) -> None:
        """Agree on the reason with the other processes, and end this process if it is another's.

        Return if this process's own exception is the reason. Also return if the reason is a mistake
        or ctrl-C on another rank, and this process met a mistake or ctrl-C too.
        """
        self._is_failing.set()
        try:
            reason = self._agreed_reason(error)
        except dist.DistError:
            self._end(self._store_gone())
        is_own = reason.rank == self._rank
        if not is_own and not (reason.is_reported_by_its_rank and isinstance(error, UserError | KeyboardInterrupt)):
            self._end(reason)
        if isinstance(error, UserError):
            error.reporting_rank = reason.rank
        if is_own and reason.kind == "exception":
            console.stop_lines(reason.lines())
        self._let_others_read(reason)

    def _agreed_reason(self, error: BaseException) -> Failure:
        if is_echo(error):
            pulses = self._pulses()
            reason = self._wait_for_reason(ECHO_SECONDS)
            gone = [rank for rank, pulse in self._pulses().items() if pulse == pulses.get(rank) and rank != self._rank]
            if reason is None and gone:
                reason = self._publish(self._gone(gone))
        else:
            waits = isinstance(error, UserError) and self._rank != 0
            reason = self._wait_for_reason(REPORTER_SECONDS) if waits else None
        return reason or self._publish(self._own_failure(error))

    def _wait_for_reason(self, seconds: float) -> Failure | None:
        end = time.monotonic() + seconds
        while (reason := self._read_reason()) is None and time.monotonic() < end:
            time.sleep(POLL_SECONDS / 5)
        return reason

    def _own_failure(self, error: BaseException) -> Failure:
        activity = self.activity
        kind = failure_kind(error)
        return Failure(
            kind,
            self._rank,
            self._host,
            "was stopped by ctrl-C" if kind == "interrupted" else message_of(error),
            activity=activity.described(),
            step=activity.step,
            phase=activity.phase,
            stage=activity.stage,
            microbatch=activity.microbatch,
            exception=type(error).__name__,
            trace=trace_of(error),
        )

    def _gone(self, ranks: list[int]) -> Failure:
        activity = self._last_activity_of(ranks[0])
        others = f" (and so {'is rank' if len(ranks) == 2 else 'are ranks'} {', '.join(map(str, ranks[1:]))})"
        return Failure(
            "gone",
            ranks[0],
            self._host_of(ranks[0]),
            f"is gone{others if len(ranks) > 1 else ''}, last seen in {activity}: killed from outside, out of memory, "
            "or its machine is down",
            activity=activity,
        )

    def _store_gone(self) -> Failure:
        host = os.environ.get("MASTER_ADDR", self._host)
        message = "is gone, or torchrun on its machine is; the store of the run ended with it"
        return Failure("gone", 0, host, message)

    def _store_silent(self) -> Failure:
        host = os.environ.get("MASTER_ADDR", self._host)
        return Failure(
            "gone", 0, host, "and the store on its machine do not answer: the machine or the network is down"
        )

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._is_over.wait(POLL_SECONDS):
            if (pause := time.monotonic() - before) > PAUSE_SECONDS:
                # The process was suspended, for example by ctrl-Z, and has resumed.
                self.activity.excuse(pause)
            before = time.monotonic()
            try:
                self._poll()
            except dist.DistError:
                if self._is_ending.is_set() or self._is_failing.is_set():
                    return
                self._end(self._store_gone())

    def _watch_store(self) -> None:
        """End this process when the store no longer answers the thread that watches."""
        polls, pulse = 0, self._pulse
        while not self._is_over.wait(POLL_SECONDS) and self._thread.is_alive():
            polls = polls + 1 if pulse == self._pulse else 0
            pulse = self._pulse
            if polls >= LOST_POLLS:
                self._end(self._store_silent(), has_store=False)

    def _poll(self) -> None:
        self._beat()
        reason = self._read_reason()
        if self._is_failing.is_set():
            # The main thread is about to report the reason.
            return
        if reason is not None:
            self._end(reason)
        self._check_neighbor()
        self._answer()
        self._check_limit()

    def _beat(self) -> None:
        self._pulse += 1
        self._store.set(f"alive/{self._rank}", f"{self._pulse} {self.activity.described()}")

    def _check_neighbor(self) -> None:
        neighbor = self._neighbor
        if neighbor.rank == self._rank or not self._store.check([f"alive/{neighbor.rank}"]):
            return
        pulse = self._store.get(f"alive/{neighbor.rank}")
        neighbor.silent_polls = neighbor.silent_polls + 1 if pulse == neighbor.pulse else 0
        neighbor.pulse = pulse
        if neighbor.silent_polls >= (SILENT_POLLS_WHEN_STOPPING if self._is_stopping() else SILENT_POLLS):
            self._end(self._publish(self._gone([neighbor.rank])))

    def _check_limit(self) -> None:
        limit, seconds = self.activity.limit_seconds(self._limits), self.activity.seconds_in_part()
        if seconds <= limit or self._store.compare_set(ASK, "", str(self._rank)) != str(self._rank).encode():
            return
        self._answer()
        end = time.monotonic() + REPORT_SECONDS
        keys = [f"report/{rank}" for rank in range(self._world_size)]
        while not self._store.check(keys) and time.monotonic() < end:
            time.sleep(POLL_SECONDS / 5)
        reports = [self._report_of(rank) for rank in range(self._world_size)]
        self._end(self._publish(hang_failure(reports, reports[self._rank], seconds, limit)))

    def _answer(self) -> None:
        if not self._has_answered and self._store.check([ASK]):
            self._has_answered = True
            frames = innermost_frames()
            described = tuple(map(describe, frames))
            report = Report(self._rank, self._host, self.activity.described(), described, is_waiting(frames))
            self._store.set(f"report/{self._rank}", json.dumps(asdict(report)))

    def _report_of(self, rank: int) -> Report:
        if not self._store.check([f"report/{rank}"]):
            return Report(rank, self._host_of(rank), self._last_activity_of(rank), (), is_waiting=False)
        values = json.loads(self._store.get(f"report/{rank}"))
        return Report(**{**values, "frames": tuple(values["frames"])})

    def _host_of(self, rank: int) -> str:
        return self._store.get(f"host/{rank}").decode() if self._store.check([f"host/{rank}"]) else "an unknown host"

    def _last_activity_of(self, rank: int) -> str:
        """Return the activity that another process last wrote, in words."""
        alive = f"alive/{rank}"
        return self._store.get(alive).decode().partition(" ")[2] if self._store.check([alive]) else "an unknown phase"

    def _pulses(self) -> dict[int, bytes]:
        keys = {rank: f"alive/{rank}" for rank in range(self._world_size)}
        there = [rank for rank, key in keys.items() if self._store.check([key])]
        return {rank: self._store.get(keys[rank]) for rank in there}

    def _read_reason(self) -> Failure | None:
        return failure_from_json(self._store.get(REASON)) if self._store.check([REASON]) else None

    def _publish(self, failure: Failure) -> Failure:
        """Offer a reason, and return the reason that counts: the first one."""
        text = failure.to_json()
        counts = self._store.compare_set(REASON, "", text).decode()
        if counts == text:
            self._write_failure(failure)
        return failure_from_json(counts)

    def _write_failure(self, failure: Failure) -> None:
        is_mistake = failure.kind == "mistake"
        if is_mistake and not self._has_begun():
            # No directory should be created or kept for a run that has not begun.
            return
        # A mistake is printed in full. If it cannot be written, that is probably the mistake
        # itself.
        self._write(failure.write, reports_problem=not is_mistake)

    def _has_begun(self) -> bool:
        return self._directory.is_dir() and any(MARK not in name for name in os.listdir(self._directory))

    def _write(self, write: Callable[[Path], None], *, reports_problem: bool = True) -> None:
        try:
            write(self._directory)
        except OSError as error:
            if reports_problem:
                sys.stderr.write(f"rank {self._rank} cannot write into {self._directory}: {error.strerror}\n")

    def _end(self, reason: Failure, *, has_store: bool = True) -> NoReturn:
        """End this process at once, and report why the run stops."""
        if reason.kind == "gone":
            end_if_torchrun_ended()
        code = EXIT_CODES.get(reason.kind, PEER_FAILED)
        # The reader of this output may hang, and the main thread may wait for a process that is
        # gone.
        threading.Timer(EXIT_SECONDS, os._exit, [code]).start()
        try:
            if not reason.is_reported_by_its_rank:
                console.stop_lines(reason.lines())
                self._write(lambda directory: write_recorder(directory, self._rank))
            run_exit_functions()
            if has_store:
                with suppress(dist.DistError):
                    self._let_others_read(reason)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _let_others_read(self, reason: Failure) -> None:
        """Record that this process has read the reason.

        If this process hosts the store, wait until the others have read it too.
        """
        self._store.set(f"reported/{self._rank}", "")
        if not self._hosts_store:
            return
        silent = {reason.rank} if reason.kind == "gone" else {each.rank for each in reason.reports if not each.frames}
        keys = [f"reported/{rank}" for rank in range(self._world_size) if rank not in silent]
        end = time.monotonic() + LINGER_SECONDS
        while not self._store.check(keys) and time.monotonic() < end:
            time.sleep(POLL_SECONDS / 5)
