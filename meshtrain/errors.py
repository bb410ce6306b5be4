"""What can go wrong, as a tree.

MeshtrainError
└── UserError                 the person can mend it: one line per problem, exit code 2
    ├── ConfigError           a run or plan file, or an override, is wrong
    ├── PlanError             the plan contradicts the model, the run or the number of processes
    ├── ModelError            the model cannot be built, cut, sharded or loaded
    │   └── NoAttribute       it has not what the stock model has; an AttributeError too, so that hasattr says no
    ├── DataError             the data or the tokenizer is missing, broken or too small
    ├── CheckpointError       a checkpoint is missing, foreign, of another shape, or cannot be written
    ├── HostError             a machine of the run cannot be reached by the others
    └── TrainingStopped       training went wrong while running (a loss that is not finite)

Anything else that escapes is a bug in meshtrain: traceback, exit code 1.
Every message answers three questions: what was asked, what was found, what to do.
"""

from collections.abc import Collection, Iterable


class MeshtrainError(Exception):
    """The root of every exception that meshtrain raises on purpose."""


class UserError(MeshtrainError):
    """A mistake that the person at the keyboard can mend.

    Args:
        problems: one message, or several found at once; each is printed on its own line.

    Attributes:
        teller: the rank that prints them, where the processes have agreed on one.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        self.teller: int | None = None
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type, tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class ConfigError(UserError):
    """A run file, a plan file or an override is wrong."""


class PlanError(UserError):
    """The plan contradicts the model, the run or the number of processes."""


class ModelError(UserError):
    """The model cannot be built, cut, sharded or loaded."""


class NoAttribute(ModelError, AttributeError):
    """A parallel model has not what the stock one has."""


class DataError(UserError):
    """The data or the tokenizer is missing, broken or too small."""


class CheckpointError(UserError):
    """A checkpoint is missing, foreign, of another shape, or cannot be written."""


class HostError(UserError):
    """A machine of the run cannot be reached by the others, or never came."""


class TrainingStopped(UserError):
    """Training stopped itself before it could do harm."""


def name_some(names: Collection[str], limit: int = 10) -> str:
    """Join the first names for a message, and count the others."""
    shown = ", ".join(list(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
