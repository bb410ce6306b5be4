"""The exceptions of meshtrain.

MeshtrainError
└── UserError                 the user can fix it: one line per problem, exit code 2
    ├── ConfigError           a run or plan file, or an override, is wrong
    ├── PlanError             the plan contradicts the model, the run or the number of processes
    ├── ModelError            the model cannot be built, cut, sharded or loaded
    │   └── MissingAttribute       a parallel model lacks an attribute of the stock model
    ├── DataError             the data or the tokenizer is missing, broken or too small
    ├── CheckpointError       a checkpoint is missing or wrong for this run, or cannot be written
    ├── HostError             a machine of the run cannot be reached by the others
    └── TrainingStopped       training went wrong while running (a loss that is not finite)

Any other exception that escapes is a bug in meshtrain: traceback, exit code 1. Every message
answers three questions: what was asked, what was found, what to do.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace


class MeshtrainError(Exception):
    """The root of every exception that meshtrain raises on purpose."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. Converted to a string, it is one line for the user.

    Attributes:
        found: what was asked and what was found.
        advice: what to do.
        about: the file, setting or checkpoint that it concerns.
    """

    found: str
    advice: str = ""
    about: str = ""

    def __str__(self) -> str:
        about = f"{self.about}: " if self.about else ""
        return f"{about}{self.found}{f'; {self.advice}' if self.advice else ''}"

    def concerning(self, about: str) -> "Problem":
        """Return the same problem with `about` put before what it concerned so far."""
        return replace(self, about=f"{about}: {self.about}" if self.about else about)


class UserError(MeshtrainError):
    """A mistake that the user can fix.

    Args:
        problems: one problem, or several found at once; each is printed on its own line. A string
            is what was found.
        advice: what to do about what was found. A problem brings its own.

    Attributes:
        problems: what is wrong.
        lines: each problem as one line. A line break becomes a space, and a character that cannot
            be printed becomes an escape, because messages quote the contents of files.
        reporting_rank: the rank that prints the problems, where the ranks have agreed on one.
    """

    def __init__(self, problems: str | Problem | Iterable[str | Problem], advice: str = "") -> None:
        several = (problems,) if isinstance(problems, str | Problem) else tuple(problems)
        self.problems = tuple(Problem(one, advice) if isinstance(one, str) else one for one in several)
        self.lines = tuple(_as_line(str(one)) for one in self.problems)
        self.reporting_rank: int | None = None
        super().__init__("\n".join(self.lines))

    def __reduce__(self) -> tuple[type, tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class ConfigError(UserError, ValueError):
    """A run file, a plan file or an override is wrong.

    It is a ValueError too, because pydantic collects those from the checks of settings.
    """


class PlanError(UserError):
    """The plan contradicts the model, the run or the number of processes."""


class ModelError(UserError):
    """The model cannot be built, cut, sharded or loaded."""


class MissingAttribute(ModelError, AttributeError):
    """A parallel model lacks an attribute of the stock model.

    It is an AttributeError too, so that `hasattr` returns False.
    """


class DataError(UserError):
    """The data or the tokenizer is missing, broken or too small."""


class CheckpointError(UserError):
    """A checkpoint is missing, belongs to another run, has another shape, or cannot be written."""


class HostError(UserError):
    """A machine of the run cannot be reached by the others, or never joined."""


class TrainingStopped(UserError):
    """Training stopped itself before it could do harm."""


def _as_line(problem: str) -> str:
    """Return a message as one line that every terminal and every encoding can show."""
    line = problem if problem.isprintable() else " ".join(problem.splitlines())
    return line if line.isprintable() else printable(line)


def printable(text: str) -> str:
    """Return a text with an escape in place of every character that cannot be printed."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def name_some(names: Collection[str], limit: int = 10) -> str:
    """Return the first names joined for a message, with the number of the others."""
    shown = ", ".join(list(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def reason_of(error: BaseException) -> str:
    """Return in one line why reading, writing or connecting failed."""
    return getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "") or type(error).__name__
