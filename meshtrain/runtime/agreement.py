"""Processes that exchange their problems, so that they fail together with the same message."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from meshtrain.errors import Problem, UserError

T = TypeVar("T")
SHOWN, BEFORE = 120, 40
"""Characters shown of a long value, and how many of them precede the first difference."""


def gather_objects(value: T, group: ProcessGroup | None = None) -> list[T]:
    """Return the `value` of every rank of a group, in rank order. Collective.

    Without a process group, a process is alone.

    Args:
        group: all ranks by default. It must not be the default group if two threads communicate at
            once.
    """
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]


@contextmanager
def failing_together(
    kind: type[UserError], group: ProcessGroup | None = None, *, except_for: tuple[type[UserError], ...] = ()
) -> Iterator[None]:
    """Raise `kind` on all ranks if the block raises a `UserError` on any of them.

    The end of the block is collective.

    Args:
        kind: of the error that all ranks raise, with the problems of all of them.
        group: as for `gather_objects`.
        except_for: errors that every rank raises by itself. They pass through unchanged.
    """
    problems: tuple[Problem, ...] = ()
    try:
        yield
    except except_for:
        raise
    except UserError as error:
        problems = error.problems
    raise_together(problems, kind, group)


def raise_together(problems: Iterable[str | Problem], kind: type[UserError], group: ProcessGroup | None = None) -> None:
    """Raise `kind` on all ranks if any rank has a problem, naming each problem once. Collective."""
    found = dict.fromkeys(problem for answer in gather_objects(list(problems), group) for problem in answer)
    if found:
        raise kind(found)


def check_alike(
    call: str, arguments: Mapping[str, object], kind: type[UserError], group: ProcessGroup | None = None
) -> None:
    """Check that all ranks call a function with the same arguments. Collective.

    Args:
        call: name of the function.
        arguments: name -> argument. They are compared as text.
        kind: of the error.
        group: as for `gather_objects`.

    Raises:
        kind: the same on all ranks, naming the first argument that differs.
    """
    answers = gather_objects({name: str(value) for name, value in arguments.items()}, group)
    for rank, answer in enumerate(answers):
        for name, value in answer.items():
            first = answers[0].get(name, "missing")
            if value != first:
                first, value = _differing_parts(first, value)
                raise kind(
                    f"{call}: {name} is {first} on rank 0 and {value} on rank {rank}; all ranks make this call "
                    "together",
                    "pass the same on all of them",
                )


def _differing_parts(one: str, other: str) -> tuple[str, str]:
    """Shorten two texts to fit in one line, from shortly before their first difference."""
    if max(len(one), len(other)) <= SHOWN:
        return one, other
    alike = next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    start = max(0, alike - BEFORE)
    return _part(one, start), _part(other, start)


def _part(text: str, start: int) -> str:
    before, after = "..." if start else "", "..." if len(text) > start + SHOWN else ""
    return f"{before}{text[start : start + SHOWN]}{after}"


def is_first_rank() -> bool:
    """Return whether this process does the work that is done once."""
    return not dist.is_initialized() or dist.get_rank() == 0
