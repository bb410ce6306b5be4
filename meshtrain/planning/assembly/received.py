"""The memory for messages between stages.

A schedule allocates it while it computes any other microbatch, so it follows another pass in a long
step than in a short one. Some keep a message until the next one of its kind.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from meshtrain.compat.schedules import Instruction
from meshtrain.planning.simulation.profile import ROLES, ActionProfile
from meshtrain.planning.simulation.recorder import Role

_MESSAGES = ROLES.index(Role.MESSAGES)
# The phases in which a schedule posts messages.
_BEFORE, _AFTER = "before passes", "after "


class Kind(NamedTuple):
    """A kind of messages between stages.

    Attributes:
        phase: of the pass that needs it.
        stage: that receives it.
        is_first: whether it is the first one for this stage in a step.
    """

    phase: str
    stage: int
    is_first: bool


def kinds_received(program: Iterable[Instruction]) -> list[tuple[Kind, ...]]:
    """Return the messages that a process posts to receive before its first pass, and after each."""
    found: list[list[Kind]] = [[]]
    begun: set[tuple[str, int]] = set()
    for it in program:
        if it.computed is not None:
            found.append([])
        elif it.do == "receive":
            for message in it.messages:
                key = message.phase, message.receiver
                found[-1].append(Kind(*key, key not in begun))
                begun.add(key)
    return [*map(tuple, found)]


def kinds_told_apart(received: Iterable[Sequence[Kind]]) -> set[Kind]:
    """Return the kinds of messages whose memory can be told apart in a step.

    Args:
        received: of the step, as `kinds_received` returns it.
    """
    return {*_solved((kinds, [0] * len(kinds)) for kinds in received)}


class Received:
    """The memory that messages of a short step take.

    Args:
        sections: what is done before the first pass of the step, and in each pass.
        received: in each of them, as `kinds_received` returns it.
    """

    def __init__(self, sections: Sequence[Sequence[ActionProfile]], received: Sequence[Sequence[Kind]]) -> None:
        found = [(kinds, _changed(actions)) for kinds, actions in zip(received, sections, strict=True) if kinds]
        self._changes = _solved(found)
        for kinds, changes in found:
            if {*kinds} <= self._changes.keys() and changes != (wanted := self._of(kinds)):
                raise RuntimeError(f"the messages {kinds} take {changes} bytes in one place, and {wanted} in others")

    def removed(self, actions: Sequence[ActionProfile], kinds: Sequence[Kind]) -> tuple[ActionProfile, ...]:
        """Return actions without the memory of the messages that are received after them."""
        return tuple(action.only(~_is_received(action)) for action in actions) if kinds else tuple(actions)

    def added(self, actions: Sequence[ActionProfile], kinds: Sequence[Kind]) -> tuple[ActionProfile, ...]:
        """Return actions after which messages are received."""
        *others, last = actions
        for size in self._of(kinds):
            last = last.with_change(size, Role.MESSAGES)
        return (*others, last)

    def _of(self, kinds: Iterable[Kind]) -> list[int]:
        """Return the bytes that begin and end with some messages, in order."""
        return [size for kind in kinds for size in self._changes[kind]]


def _changed(actions: Iterable[ActionProfile]) -> list[int]:
    return [size for action in actions for size in action.changes[_is_received(action)].tolist()]


def _is_received(action: ActionProfile) -> np.ndarray:
    """Return (events,) bool: whether memory for a message from another stage begins or ends."""
    return (action.roles == _MESSAGES) & (action.phase == _BEFORE or action.phase.startswith(_AFTER))


def _solved(sections: Iterable[tuple[Sequence[Kind], Sequence[int]]]) -> dict[Kind, list[int]]:
    """Return the changes that belong to each kind of messages, as far as they can be told apart.

    Args:
        sections: the kinds of some messages, in order, and the changes of memory with all of them.
    """
    known: dict[Kind, list[int]] = {}
    waiting = [*sections]
    while True:
        for kinds, changes in waiting:
            unknown = {*kinds} - known.keys()
            if len(unknown) == 1:
                (kind,) = unknown
                others = sum(len(known[it]) for it in kinds if it != kind)
                begin = sum(len(known[it]) for it in kinds[: kinds.index(kind)])
                known[kind] = [*changes[begin : begin + (len(changes) - others) // kinds.count(kind)]]
                break
        else:
            return known
