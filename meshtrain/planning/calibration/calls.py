"""The operators of a run, with the shapes of what they are called with."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshtrain.compat.operators import OF_MANY_TENSORS
from meshtrain.compat.operators_seen import full_name_of, operator_of
from meshtrain.planning.calibration.gpu_calls import call_on_gpu
from meshtrain.planning.simulation.rank import record_rank
from meshtrain.planning.simulation.recorder import Recorder, Work
from meshtrain.planning.simulation.run import SimulatedRun
from meshtrain.planning.speed.rates import operator_key, operator_size

# Larger calls would take too long, and too much memory. Of lists of tensors, some are enough.
LARGEST_BYTES = 2**30
# Sizes of each operator that are measured.
SIZES = 6
# How many numbers are drawn for a tensor. In a larger one they repeat.
DRAWN = 2**16


@dataclass(frozen=True)
class TensorShape:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """A call of an operator.

    Attributes:
        operator: its full name.
        key: its name in the description of a machine.
        size: operations or bytes, as in `operator_size`.
        num_bytes: that it reads and writes.
        args: with a `TensorShape` in place of each tensor.
        kwargs: likewise.
    """

    operator: str
    key: str
    size: int
    num_bytes: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, device: torch.device) -> Callable[[], object]:
        """Return a function that makes this call on a device, with arguments of its own."""
        args, kwargs = with_values(list(self.args), device), with_values(self.kwargs, device)
        if device.type != "cpu":
            return call_on_gpu(self.operator, args, kwargs)
        return partial(operator_of(self.operator), *args, **kwargs)


class CallRecorder(Recorder):
    """A recorder that also keeps one call of each size of each operator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: dict[tuple[str, int], Call] = {}

    def count(self, work: Work, func: Any, args: Any, kwargs: Any) -> None:
        """Count an operator, and keep the call."""
        super().count(work, func, args, kwargs)
        key, size = operator_key(work), operator_size(work)
        if (key, size) not in self.calls and work.num_bytes > 0:
            shapes = _without_values(list(args)), _without_values(kwargs)
            call = Call(full_name_of(func), key, size, work.num_bytes, tuple(shapes[0]), shapes[1])
            self.calls[key, size] = call if work.num_bytes <= LARGEST_BYTES else with_shorter_lists(call)


def record_calls(runs: Sequence[SimulatedRun]) -> list[Call]:
    """Return calls of every operator that runs use, with a few sizes of each."""
    found: dict[tuple[str, int], Call] = {}
    for run in runs:
        found |= record_rank(run, 0, CallRecorder).calls
    by_key: dict[str, dict[int, Call]] = {}
    for call in found.values():
        if 0 < call.num_bytes <= LARGEST_BYTES:
            by_key.setdefault(call.key, {})[call.size] = call
    return [call for calls in by_key.values() for call in _spread([calls[size] for size in sorted(calls)])]


def _spread(calls: Sequence[Call]) -> Iterable[Call]:
    """Return a few calls, from the smallest to the largest."""
    if len(calls) <= SIZES:
        return calls
    return [calls[round(index * (len(calls) - 1) / (SIZES - 1))] for index in range(SIZES)]


def with_shorter_lists(call: Call) -> Call:
    """Return a call with those of its lists of tensors that fit into `LARGEST_BYTES`.

    An optimizer updates all parameters in one call. Its time follows from that of many parameters,
    but not from that of few, for which a GPU mostly waits. Other operators with lists have
    arguments that belong to the whole lists, so their calls stay as they are.
    """
    if not call.key.startswith(OF_MANY_TENSORS):
        return call
    lists = [value for value in (*call.args, *call.kwargs.values()) if _is_list_of_tensors(value)]
    if not lists:
        return call
    sizes = [math.prod(tensor.shape) for tensor in lists[0]]
    allowed, chosen = LARGEST_BYTES / call.num_bytes * sum(sizes), []
    for index in sorted(range(len(sizes)), key=sizes.__getitem__):
        if (allowed := allowed - sizes[index]) < 0:
            break
        chosen.append(index)
    share = sum(sizes[index] for index in chosen) / sum(sizes)
    if share * call.num_bytes < LARGEST_BYTES / 8:
        # The others are too large, and these few would tell little.
        return call

    def shorter(value: Any) -> Any:
        return type(value)(value[index] for index in chosen) if _is_list_of_tensors(value) else value

    return replace(
        call,
        size=int(share * call.size),
        num_bytes=int(share * call.num_bytes),
        args=tuple(map(shorter, call.args)),
        kwargs={name: shorter(value) for name, value in call.kwargs.items()},
    )


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, TensorShape) for item in value)


def _without_values(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorShape(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, list | tuple):
        return type(value)(map(_without_values, value)) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return {key: _without_values(item) for key, item in value.items()}
    return value


def with_values(value: Any, device: torch.device) -> Any:
    """Return arguments with memory and values: numbers near 1, first rows and False."""
    if isinstance(value, TensorShape):
        reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride, strict=True))
        memory = torch.empty(max(0, 1 + reach) if 0 not in value.shape else 0, dtype=value.dtype, device=device)
        if value.dtype.is_floating_point:
            _fill_near_one(memory)
        else:
            memory.zero_()
        return memory.as_strided(value.shape, value.stride)
    if isinstance(value, list | tuple):
        return type(value)(with_values(item, device) for item in value)
    if isinstance(value, dict):
        return {key: with_values(item, device) for key, item in value.items()}
    return device if isinstance(value, torch.device) else value


def _fill_near_one(memory: Tensor) -> None:
    """Fill a vector with numbers near 1, which repeat, because so many would take long to draw.

    They neither overflow nor vanish when an operator changes them many times.
    """
    drawn = torch.empty(min(DRAWN, memory.numel()), dtype=memory.dtype, device=memory.device).uniform_(0.9, 1.1)
    for part in memory.split(DRAWN):
        part.copy_(drawn[: len(part)])
