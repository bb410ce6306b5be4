"""Record what one process does in a step: its memory, its operators and its messages."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from meshtrain.compat.autograd import UncompiledMode
from meshtrain.compat.fake import is_on_meta, storage_key
from meshtrain.compat.fake_operators import FakeOperators, Likeness, device_asked, has_dtensor
from meshtrain.compat.operators import ITEMS
from meshtrain.compat.operators_seen import (
    BUFFERED,
    GATHERED,
    LOOKUPS,
    MESSAGES,
    QUERIES,
    UNTOUCHING,
    WAITS,
    changed_arguments,
    flops_of,
    group_name_of,
    name_of,
    tensors_of,
)
from meshtrain.config.mesh import REPLICA_AXES

# Number format of the scales of blocks.
BLOCK_SCALES = torch.float8_e8m0fnu
START = "start"
HEAD: Literal["head"] = "head"
Place = int | Literal["head"] | None


class Role(StrEnum):
    """What memory is for."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    TEACHER = "teacher"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    UNREDUCED = "gradients before their reduction"
    GATHERED = "gathered parameters"
    MESSAGES = "messages"
    BATCH = "batch"
    LOSS = "logits and loss"
    ACTIVATIONS = "activations"
    TEMPORARY = "temporary"


class Work(NamedTuple):
    """One kind of operator: how often it ran is counted beside it.

    Attributes:
        name: of the operator.
        dtype: of its first tensor; of the scales, for a product of blocks.
        flops: of one call.
        num_bytes: that one call reads and writes.
        axis: of the mesh, for a message; otherwise None.
    """

    name: str
    dtype: torch.dtype | None
    flops: int
    num_bytes: int
    axis: str | None


# An operator that sends a message, whose size is not in its key, and one that makes a view.
_MESSAGE, _VIEW = (Work(name, None, 0, 0, None) for name in ("a message", "a view"))


WAIT = Work("wait_tensor", None, 0, 0, None)
"""Stands behind what was computed while a message traveled. Others were awaited at once."""


class Change(NamedTuple):
    """A piece of memory that begins or ends.

    Attributes:
        num_bytes: positive if it begins, negative if it ends.
        storage: number of the storage.
        place: where it began, as in `Action`.
        section: number of the section in which it began, as in `Action`.
    """

    num_bytes: int
    storage: int
    place: Place
    section: int


@dataclass(frozen=True)
class Action:
    """The part of a section of a step in one layer.

    A section is, for example, the forward pass of a stage for a microbatch.

    Attributes:
        phase: as in `Activity`: forward, backward, optimizer and so on.
        stage: index of the pipeline stage, if one computes.
        microbatch: counted from 0, if one is computed.
        place: the layer, counted from the first of the stage; "head" after the last one of the
            model; None elsewhere, or where it is not known.
        section: number of the section.
        changes: of memory, in their order.
        work: messages, and how often each kind of operator ran between them; see `WAIT`.
    """

    phase: str
    stage: int | None
    microbatch: int | None
    place: Place
    section: int
    changes: list[Change] = field(default_factory=list)
    work: list[Counter[Work] | Work] = field(default_factory=list)


class Recorder(UncompiledMode):
    """Records every allocation, operator and message while it is active.

    Attributes:
        actions: what was done, in order. The first one holds what existed before.
        roles: number of a storage -> what it is for, where that is known.

    It works with fake tensors and with real ones, so that a simulation can be compared with a run.

    Args:
        axes: name of a process group -> axis of the mesh.
        answers: whether a number that is read from a tensor is 0, because fake tensors have no
            values. So no gradient is missing, and not every sequence of a batch is without padding.
        granularity: of the allocator in bytes.
    """

    def __init__(self, axes: Mapping[str, str], *, answers: bool, granularity: int = 1) -> None:
        super().__init__()
        self.actions: list[Action] = [Action(START, None, None, None, 0)]
        self.roles: dict[int, Role] = {}
        self._axes, self._answers, self._granularity = axes, answers, granularity
        self._hidden, self._run_fake = 0, FakeOperators()
        self._works: dict[Likeness, Work | None] = {}
        self._live: dict[int, Change] = {}
        self._numbers: dict[int, int] = {}
        self._num_storages = 0
        self._last_sent: tuple[object, set[int]] = None, set()

    def enter(self, phase: str, stage: int | None = None, microbatch: int | None = None, place: Place = None) -> None:
        """Begin a section."""
        self.actions.append(Action(phase, stage, microbatch, place, self.actions[-1].section + 1))

    def move(self, place: Place) -> None:
        """Go on in another layer of the same section."""
        last = self.actions[-1]
        if place != last.place:
            self.actions.append(Action(last.phase, last.stage, last.microbatch, place, last.section))

    def work(self) -> Counter[Work]:
        """Return how often each kind of operator ran."""
        return total_work(work for action in self.actions for work in action.work)

    def hide(self, change: int) -> None:
        """Ignore operators while the sum of all changes is above 0."""
        self._hidden += change

    def hold(self, tensors: Iterable[Tensor], role: Role) -> None:
        """Give the memory of some tensors a role.

        The first role counts, except that gradients stay where a message has brought them.
        """
        for tensor in tensors:
            number = self._number(tensor.untyped_storage())
            if self.roles.get(number, Role.MESSAGES) is Role.MESSAGES:
                self.roles[number] = role

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage has another size now."""
        key = storage_key(storage)
        if key in self._numbers:
            self._end(self._numbers[key])
            self._begin(self._numbers[key], storage.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and record it."""
        if self._answers and (device := device_asked(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        if has_dtensor(tuple(types)):
            # DTensor runs the operator again, on the local parts.
            return NotImplemented
        if self._hidden:
            return func(*args, **kwargs)
        if self._answers and func in ITEMS:
            return _zero(args[0].dtype)
        result, like = self._run_fake(func, args, kwargs) if self._answers else (func(*args, **kwargs), None)
        self._record(func, args, kwargs, result, like)
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any, like: Likeness | None) -> None:
        """Record an operator.

        Args:
            func: the operator.
            args: that it was called with.
            kwargs: that it was called with.
            result: of the operator.
            like: the same for operators that do the same; None if that is not known.
        """
        if like is None:
            work = _work_of(func, args, kwargs, result)
        elif like in self._works:
            work = self._works[like]
        else:
            work = self._works[like] = _work_of(func, args, kwargs, result)
        if work is None:
            return
        results = tensors_of(result)
        for tensor in results:
            if not is_on_meta(tensor):
                self._number(tensor.untyped_storage())
        if work is _MESSAGE:
            self._record_message(name_of(func)[1], args, [*tensors_of([*args, *kwargs.values()]), *results])
        elif work is not _VIEW:
            self.count(work, func, args, kwargs)

    def count(self, work: Work, func: Any, args: Any, kwargs: Any) -> None:
        """Count an operator.

        Args:
            work: what it does.
            func: the operator.
            args: that it was called with.
            kwargs: that it was called with.
        """
        items = self.actions[-1].work
        if not items or isinstance(items[-1], Work) or work.name == GATHERED:
            items.append(Counter())
        counter = items[-1]
        assert isinstance(counter, Counter)
        counter[work] += 1

    def _record_message(self, name: str, args: Any, given: list[Tensor]) -> None:
        items = self.actions[-1].work
        if name in WAITS:
            last, keys = self._last_sent
            if name == WAIT.name and not (items and items[-1] is last and keys.intersection(map(_key, given))):
                items.append(WAIT)
            return
        if name in BUFFERED:
            self.hold(given, Role.MESSAGES)
        items.append(message_of(name, args, given, self._axes))
        self._last_sent = items[-1], set(map(_key, given))

    def _number(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage; a new one is recorded."""
        key = storage_key(storage)
        if key not in self._numbers:
            self._num_storages += 1
            self._numbers[key] = self._num_storages
            finalize(storage, self._freed, key)
            self._begin(self._num_storages, storage.nbytes())
        return self._numbers[key]

    def _freed(self, key: int) -> None:
        self._end(self._numbers.pop(key))

    def _begin(self, number: int, num_bytes: int) -> None:
        if num_bytes == 0:
            return
        rounded = -(-num_bytes // self._granularity) * self._granularity
        action = self.actions[-1]
        change = Change(rounded, number, action.place, action.section)
        self._live[number] = change
        action.changes.append(change)

    def _end(self, number: int) -> None:
        begun = self._live.pop(number, None)
        if begun is not None:
            self.actions[-1].changes.append(begun._replace(num_bytes=-begun.num_bytes))


def _key(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _work_of(func: Any, args: Any, kwargs: Any, result: Any) -> Work | None:
    """Return what an operator does; None if it does nothing on the device."""
    if func.namespace in QUERIES:
        return None
    results, given = tensors_of(result), tensors_of([*args, *kwargs.values()])
    if all(map(is_on_meta, results)) if results else any(map(is_on_meta, given)):
        # Only shapes are computed, such as those of the messages between stages.
        return None
    namespace, name = name_of(func)
    if namespace in MESSAGES:
        return _MESSAGE
    if func.is_view:
        return _VIEW
    # A lookup reads as much as it returns, and not the whole table.
    read = sum(map(_size, results if name in LOOKUPS else given))
    # An optimizer's kernel returns nothing, and changes what it is given.
    written = results or tensors_of(changed_arguments(func, args))
    moved = 0 if name in UNTOUCHING else read + sum(map(_size, written))
    first = given or results
    # Products of blocks, whose scales are in a format of their own, may have another rate.
    dtypes = [it.dtype for it in first if it.dtype == BLOCK_SCALES] or [it.dtype for it in first]
    return Work(name, dtypes[0] if dtypes else None, flops_of(func, args, kwargs, result), moved, None)


def message_of(name: str, args: Any, tensors: list[Tensor], axes: Mapping[str, str]) -> Work:
    """Return a message that an operator sends.

    Args:
        name: of the operator.
        args: its arguments, of which one is the process group, or its name.
        tensors: that it takes and returns. The largest one counts.
        axes: name of a process group -> axis of the mesh.
    """
    names = (argument if isinstance(argument, str) else group_name_of(argument) for argument in args)
    axis = next((axes[group] for group in names if group is not None and group in axes), "other")
    largest = max(map(_size, tensors), default=0)
    return Work(name, tensors[0].dtype if tensors else None, 0, largest, axis)


def total_work(items: Iterable[Counter[Work] | Work]) -> Counter[Work]:
    """Return how often each kind of operator ran, and each message was sent, without waits."""
    total: Counter[Work] = Counter()
    for item in items:
        total.update([item] if isinstance(item, Work) else item)
    del total[WAIT]
    return total


class Sent(NamedTuple):
    """A message.

    Attributes:
        message: its operator, bytes and axis.
        meanwhile: what is computed until the wait for it; None if it is awaited at once. This
            follows in the work, too.
    """

    message: Work
    meanwhile: Counter[Work] | None


def sent_and_computed(items: Sequence[Counter[Work] | Work]) -> Iterator[Sent | Counter[Work]]:
    """Yield what was sent, and what was computed, in their order."""
    for at, item in enumerate(items):
        if not isinstance(item, Work):
            yield item
        elif item != WAIT:
            yield Sent(item, None if item.axis in REPLICA_AXES else _until_wait(items, at + 1))


def _until_wait(items: Sequence[Counter[Work] | Work], begin: int) -> Counter[Work] | None:
    """Return what is computed from a place on until a wait; None if another message comes first.

    Sums over copies begin as soon as gradients are complete, also before that wait.
    """
    computed = []
    for at in range(begin, len(items)):
        item = items[at]
        if not isinstance(item, Work):
            computed.append(item)
        elif item.axis not in REPLICA_AXES:
            return total_work(computed) if item == WAIT else None
    return None


def _zero(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
