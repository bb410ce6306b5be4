"""Why a run failed: one reason, the same in the words of every process and in RUN/failure.json."""

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
"""What a process says whose peer is gone; never a cause."""
MOST_REPORTS_SHOWN = 16

Kind = Literal["exception", "mistake", "interrupted", "gone", "stuck"]


@dataclass(frozen=True)
class Report:
    """What a process was doing when all were asked.

    Attributes:
        place: its step, stage, microbatch and phase, in words.
        frames: the innermost functions of its main thread, innermost first; none if it did not answer.
        is_waiting: whether it waits for others there.
    """

    rank: int
    host: str
    place: str
    frames: tuple[str, ...]
    is_waiting: bool

    def sentence(self) -> str:
        """Say it in a line."""
        where = f"at {self.frames[0]}" if self.frames else "does not answer"
        return f"rank {self.rank} on {self.host}: {self.place}{', waiting' if self.is_waiting else ''}, {where}"


@dataclass(frozen=True)
class Failure:
    """The reason why all processes stop.

    Attributes:
        kind: a process raised an `exception` or met a `mistake` of the user, was `interrupted` by ctrl-C, is `gone`, or
            is `stuck`.
        rank: of the process that is the cause.
        host: its machine.
        place: its step, stage, microbatch and phase, in words; empty if unknown.
        message: what happened, in a line.
        trace: of the exception.
        reports: what all were doing, if they were asked.
    """

    kind: Kind
    rank: int
    host: str
    message: str
    place: str = ""
    step: int | None = None
    phase: str | None = None
    stage: int | None = None
    microbatch: int | None = None
    exception: str | None = None
    trace: str | None = None
    reports: tuple[Report, ...] = ()

    @property
    def is_told_by_its_rank(self) -> bool:
        """Whether the cause speaks for itself, so that the others need not."""
        return self.kind in ("mistake", "interrupted")

    def sentence(self) -> str:
        """Say who failed where and why, in a line."""
        who = f"rank {self.rank} on {self.host}"
        if self.kind == "exception":
            return f"{who} failed in {self.place}: {self.message}"
        return f"{who} {self.message}"

    def lines(self) -> list[str]:
        """Say it, and what every process was doing."""
        shown = [f"  {report.sentence()}" for report in self.reports[:MOST_REPORTS_SHOWN]]
        more = len(self.reports) - len(shown)
        return [self.sentence(), *shown, *([f"  and {more} more, in {FAILURE_NAME}"] if more else [])]

    def to_json(self) -> str:
        """Write it as JSON."""
        return json.dumps(asdict(self), indent=2)

    def write(self, directory: Path) -> None:
        """Write it into a run directory, whole or not at all."""
        directory.mkdir(parents=True, exist_ok=True)
        draft = directory / f".{FAILURE_NAME}.{os.getpid()}"
        draft.write_text(self.to_json() + "\n")
        draft.replace(directory / FAILURE_NAME)


def failure_from_json(text: str | bytes) -> Failure:
    """Read what `Failure.to_json` wrote."""
    values = json.loads(text)
    reports = tuple(Report(**{**report, "frames": tuple(report["frames"])}) for report in values["reports"])
    return Failure(**{**values, "reports": reports})


def kind_of(error: BaseException) -> Kind:
    """Say what an exception means for the run."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "mistake" if isinstance(error, UserError) else "exception"


def is_echo(error: BaseException) -> bool:
    """Whether an exception only says that a peer is gone."""
    return any(has_echo(str(cause)) for cause in chain(error))


def has_echo(text: str) -> bool:
    """Whether a text says that a peer is gone."""
    return any(echo in text for echo in ECHOES)


def chain(error: BaseException) -> Iterable[BaseException]:
    """Yield an exception and what caused it."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def message_of(error: BaseException) -> str:
    """Return `ValueError: ...` of the first cause, in a line."""
    *_, cause = chain(error)
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}".removesuffix(": ")


def trace_of(error: BaseException) -> str:
    """Return the traceback as text."""
    return "".join(traceback.format_exception(error))
