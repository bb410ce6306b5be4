"""Processes that learn of each other's problems, so that they fail together and with the same words."""

from collections.abc import Iterable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from meshtrain.errors import UserError

T = TypeVar("T")


def gather_objects(value: T, group: ProcessGroup | None = None) -> list[T]:
    """Return the `value` of every rank of a group in its order. Collective; a process without any group is alone.

    Args:
        group: of all ranks, unless told otherwise; another than the default one, if two threads talk at once.
    """
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]


def raise_together(problems: Iterable[str], kind: type[UserError], group: ProcessGroup | None = None) -> None:
    """Raise `kind` on all ranks if any rank has a problem, each problem named once. Collective."""
    found = dict.fromkeys(problem for answer in gather_objects(list(problems), group) for problem in answer)
    if found:
        raise kind(found)


def is_first_rank() -> bool:
    """Whether this process is the one that does what is done once."""
    return not dist.is_initialized() or dist.get_rank() == 0
