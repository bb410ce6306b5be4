"""Why a run failed: one reason, which every process reports and RUN/failure.json holds."""

import json
import os
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from meshtrain.errors import UserError
from meshtrain.runtime.exit_codes import PEER_FAILED

FAILURE_NAME = "failure.json"
ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "remote process exited",
    "NCCL communicator was aborted",
    f"exit code {PEER_FAILED}",
)
"""Messages of a process whose peer is gone. They are never the cause."""
MOST_REPORTS_SHOWN = 16

FailureKind = Literal["exception", "mistake", "interrupted", "gone", "hung"]


@dataclass(frozen=True)
class Report:
    """What a process was doing when a hang was investigated.

    Attributes:
        activity: its step, stage, microbatch and phase, in words.
        frames: the innermost functions of its main thread, innermost first. Empty if it did not
            answer.
        is_waiting: whether it was waiting for other processes.
    """

    rank: int
    host: str
    activity: str
    frames: tuple[str, ...]
    is_waiting: bool

    def sentence(self) -> str:
        """Return the report in one line."""
        where = f"at {self.frames[0]}" if self.frames else "does not answer"
        return f"rank {self.rank} on {self.host}: {self.activity}{', waiting' if self.is_waiting else ''}, {where}"


@dataclass(frozen=True)
class Failure:
    """The reason why all processes stop.

    Attributes:
        kind: a process raised an `exception`, met a `mistake` of the user, was `interrupted` by
            ctrl-C, is `gone`, or has `hung`.
        rank: of the process that is the cause.
        host: its machine.
        activity: its step, stage, microbatch and phase, in words; empty if unknown.
        message: what happened, in one line.
        trace: of the exception.
        reports: what all processes were doing, if a hang was investigated.
    """

    kind: FailureKind
    rank: int
    host: str
    message: str
    activity: str = ""
    step: int | None = None
    phase: str | None = None
    stage: int | None = None
    microbatch: int | None = None
    exception: str | None = None
    trace: str | None = None
    reports: tuple[Report, ...] = ()

    @property
    def is_reported_by_its_rank(self) -> bool:
        """Return whether the process that is the cause reports it, so that the others need not."""
        return self.kind in ("mistake", "interrupted")

    def sentence(self) -> str:
        """Return in one line which process failed, where and why."""
        who = f"rank {self.rank} on {self.host}"
        if self.kind == "exception":
            return f"{who} failed in {self.activity}: {self.message}"
        return f"{who} {self.message}"

    def lines(self) -> list[str]:
        """Return the sentence of the failure, followed by what the processes were doing."""
        shown = [f"  {report.sentence()}" for report in self.reports[:MOST_REPORTS_SHOWN]]
        more = len(self.reports) - len(shown)
        return [self.sentence(), *shown, *([f"  and {more} more, in {FAILURE_NAME}"] if more else [])]

    def to_json(self) -> str:
        """Return the failure as JSON."""
        return json.dumps(asdict(self), indent=2)

    def write(self, directory: Path) -> None:
        """Write the failure into a run directory, completely or not at all."""
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f".{FAILURE_NAME}.{os.getpid()}"
        temporary.write_text(self.to_json() + "\n")
        temporary.replace(directory / FAILURE_NAME)


def failure_from_json(text: str | bytes) -> Failure:
    """Return the failure that `Failure.to_json` wrote."""
    values = json.loads(text)
    reports = tuple(Report(**{**report, "frames": tuple(report["frames"])}) for report in values["reports"])
    return Failure(**{**values, "reports": reports})


def failure_kind(error: BaseException) -> FailureKind:
    """Return the kind of failure that an exception is."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "mistake" if isinstance(error, UserError) else "exception"


def is_echo(error: BaseException) -> bool:
    """Return whether an exception only reports that a peer is gone."""
    return any(has_echo(str(cause)) for cause in chain(error))


def has_echo(text: str) -> bool:
    """Return whether a text reports that a peer is gone."""
    return any(echo in text for echo in ECHOES)


def chain(error: BaseException) -> Iterable[BaseException]:
    """Yield an exception, its cause, the cause of that, and so on."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def message_of(error: BaseException) -> str:
    """Return `ValueError: ...` of the first cause, in one line."""
    *_, cause = chain(error)
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}".removesuffix(": ")


def trace_of(error: BaseException) -> str:
    """Return the traceback as text."""
    return "".join(traceback.format_exception(error))
