"""Run operators on fake tensors faster than torch's mode does."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from meshtrain.compat.autograd import UncompiledMode

# The classes of arguments that are compared by their values.
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_Make = Callable[[Any], Any]
# Number of known operators after which all are forgotten. A step has about a thousand.
MOST_KNOWN = 50_000
_DEVICE = torch.ops.prim.device.default
_GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default


@dataclass(frozen=True, eq=False)
class Likeness:
    """What operators have in common whose results look the same; equal to itself only.

    Attributes:
        make: makes a result from the arguments; None if torch must do it.

    Why: as for `FakeOperators`.
    Holds: torch 2.11 to 2.13.
    """

    make: _Make | None


class FakeOperators:
    """Runs operators on fake tensors, and keeps what their results look like.

    Why: the mode of fake tensors has a cache too, but takes several times as long to find a result
    there. A step has thousands of operators, and the same ones in each layer.
    Holds: torch 2.11 to 2.13.
    """

    # Of all simulations of this process.
    _known: ClassVar[dict[Any, Likeness]] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Likeness | None]:
        """Return the result of an operator, and what it has in common with others, if known."""
        if func is _GROUPED_PRODUCT:
            return _grouped_product(func, args, kwargs), None
        if func.namespace == "profiler":
            # It marks a part of a trace, and takes no tensor.
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs), None
        key = _key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs), None
        # The key is hashed once: that takes longer than all else here.
        like = self._known.get(key)
        if like is None:
            result = func(*args, **kwargs)
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            like = self._known[key] = Likeness(_maker(func, args, result))
            return result, like
        if like.make is None:
            return func(*args, **kwargs), like
        with torch._C._DisableTorchDispatch():
            return like.make(args), like


class QuickFakeTensors(UncompiledMode):
    """The mode of fake tensors, in which operators run as `FakeOperators` runs them.

    Args:
        fake: the mode of fake tensors.

    Why: as for `FakeOperators`.
    Holds: torch 2.11 to 2.13.
    """

    def __init__(self, fake: AbstractContextManager[Any]) -> None:
        super().__init__()
        self._fake, self._run = fake, FakeOperators()

    def __enter__(self) -> Self:
        """Begin to make fake tensors."""
        self._fake.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Make other tensors again."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._fake.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        if (device := device_asked(func, args)) is not None:
            return device
        if has_dtensor(tuple(types)):
            # DTensor runs the operator again, on the local parts.
            return NotImplemented
        return self._run(func, args, kwargs or {})[0]


@functools.cache
def has_dtensor(types: tuple[type, ...]) -> bool:
    """Return whether one of the classes of arguments is DTensor, or derived from it.

    Why: as for `FakeOperators`.
    Holds: torch 2.11 to 2.13.
    """
    return any(issubclass(kind, DTensor) for kind in types)


def device_asked(func: Any, args: Any) -> torch.device | None:
    """Return the device of a tensor if an operator only asks for it.

    Why: autograd asks so for the device of every gradient, which is most of all operators.
    Holds: torch 2.11 to 2.13.
    """
    if func is _DEVICE and type(args[0]) is FakeTensor:
        return args[0].fake_device
    return None


def _grouped_product(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the product of stacked matrices.

    It works in every number format on the CPU, but its fake version refuses all but bfloat16.
    """
    first, second, *rest = args
    if first.dtype == torch.bfloat16:
        return func(*args, **kwargs)
    return func(first.bfloat16(), second.bfloat16(), *rest, **kwargs).to(first.dtype)


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what decides how the result of an operator looks, or None if that is not known."""
    if func.namespace not in ("aten", "_c10d_functional") or not args:
        return None
    # Torch computes the hash of an operator in Python. Operators exist as long as the process.
    found: list[Any] = [id(func)]
    if not _describe(args, found):
        return None
    for name, value in kwargs.items():
        found.append(name)
        if not _describe((value,), found):
            return None
    return tuple(found)


def _describe(values: Any, found: list[Any]) -> bool:
    """Append what is known of some arguments, and return whether that is all."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None:
                return False
            mode, device = value.fake_mode, value.fake_device
            found += (value.dtype, value.shape, value.stride(), value.storage_offset(), mode, device)
        elif kind is list or kind is tuple:
            found.append(len(value))
            if not _describe(value, found):
                return False
        elif kind in _PLAIN:
            # True, 1 and 1.0 are equal.
            found += (kind, value)
        else:
            return False
    return True


def _maker(func: Any, args: Any, result: Any) -> _Make | None:
    """Return what makes the same result again from like arguments, or None if nothing can."""
    first = args[0]
    if result is first and type(first) is FakeTensor:
        return lambda args: args[0]
    results = result if isinstance(result, tuple | list) else (result,)
    if func._schema.is_mutable or not all(map(_is_simple, results)):
        return None
    given = {it.untyped_storage()._cdata for it in _tensors(args)}
    storages = [it.untyped_storage()._cdata for it in results]
    if type(first) is FakeTensor and {*storages} == {first.untyped_storage()._cdata}:
        makers = [_view_maker(it) for it in results]
    elif given.isdisjoint(storages) and len({*storages}) == len(storages) and all(map(_fills_storage, results)):
        makers = [_new_maker(it) for it in results]
    else:
        return None
    if isinstance(result, FakeTensor):
        return makers[0]
    kind = type(result)
    return lambda args: kind([make(args) for make in makers])


def _is_simple(value: Any) -> bool:
    if type(value) is not FakeTensor or value.constant is not None:
        return False
    return not (value.requires_grad or value.is_conj() or value.is_neg() or value.layout != torch.strided)


def _fills_storage(tensor: Tensor) -> bool:
    size = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    num_bytes = size * tensor.element_size() if tensor.numel() else 0
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == num_bytes


def _view_maker(like: FakeTensor) -> _Make:
    shape, stride, offset, dtype = like.shape, like.stride(), like.storage_offset(), like.dtype
    wrap = _wrapper(like)

    def make(args: Any) -> Any:
        element = torch.empty(0, dtype=dtype, device="meta")
        element.set_(args[0].untyped_storage(), offset, shape, stride)
        return wrap(element)

    return make


def _new_maker(like: FakeTensor) -> _Make:
    shape, stride, dtype, wrap = like.shape, like.stride(), like.dtype, _wrapper(like)
    return lambda args: wrap(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))


def _wrapper(like: FakeTensor) -> Callable[[Tensor], FakeTensor]:
    """Return a function that makes fake tensors like a new one from tensors on meta.

    The constructor checks much that is the same for all of them.
    """
    state, device = dict(vars(like)), like.fake_device

    def wrap(element: Tensor) -> FakeTensor:
        made = Tensor._make_subclass(
            FakeTensor, element, require_grad=False, dispatch_device=True, device_for_backend_keys=device
        )
        vars(made).update(state)
        return made

    return wrap


def _tensors(values: Any) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
