"""Find out with which values the constructor of a model fills its parameters and buffers.

Some classes have no initialization rule for a tensor: the values that its constructor drew stay. On
the meta device a constructor runs without values. So its operators are recorded, and those that
lead to one tensor are repeated on the CPU.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshtrain.compat.autograd import OperatorMode, map_tensors, memory_of, tensors_in


class _Operation(NamedTuple):
    """A call of an operator.

    The views are those of the tensors at the time of the call: a parameter may get other memory
    later, by an assignment to its `data`.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    took: "list[_View]"
    gave: "list[_View]"

    def repeat(self, real: "Mapping[_View, Tensor]") -> Any:
        """Call the operator again, on the CPU with real tensors."""
        views = iter(self.took)

        def to_real(tensor: Tensor) -> Tensor:
            return real.get(next(views), tensor)

        args, kwargs = map_tensors(to_real, (self.args, dict(self.kwargs)))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        return self.function(*args, **kwargs)


class ConstructedTensors:
    """The parameters and buffers of a model as its constructor fills them.

    Args:
        build: builds the model on the meta device.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        recorder = _Recorder()
        with recorder, _Constants(recorder):
            model = build()
        self._operations = recorder.operations
        self._tensors = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }

    def __contains__(self, name: str) -> bool:
        """Return whether the model has a parameter or buffer of this name."""
        return name in self._tensors

    def values(self, name: str) -> Tensor:
        """Return the values of a full tensor, on the CPU.

        Random values come from the stream of the CPU.
        """
        wanted = self._tensors[name]
        # A parameter is another object than the tensor that it was made of, with the same memory.
        real: dict[_View, Tensor] = {}
        for operation in self._leading_to(wanted):
            real.update(zip(operation.gave, tensors_in(operation.repeat(real)), strict=True))
        return real[_view(wanted)]

    def _leading_to(self, wanted: Tensor) -> list[_Operation]:
        needed, found = {_view(wanted).memory}, []
        for operation in reversed(self._operations):
            if any(view.memory in needed for view in operation.gave):
                needed.update(view.memory for view in operation.took)
                found.append(operation)
        return found[::-1]


class _View(NamedTuple):
    """What is the same for all tensors that are the same part of the same memory."""

    memory: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def _view(tensor: Tensor) -> _View:
    return _View(memory_of(tensor), tensor.shape, tensor.stride(), int(tensor.storage_offset()))


class _Recorder(OperatorMode):
    """Dispatch mode that keeps all operators, and with them the tensors of the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        # Their memory is not reused for others.
        self._kept: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        took = [_view(tensor) for tensor in tensors_in((args, kwargs or {}))]
        result = func(*args, **(kwargs or {}))
        self.note(func, args, kwargs or {}, took, result)
        return result

    def note(
        self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], took: "list[_View]", result: Any
    ) -> None:
        """Keep a call and the tensors of its result."""
        if given := tensors_in(result):
            self._kept += [tensor.detach() for tensor in given]
            self.operations.append(_Operation(function, args, kwargs, took, [_view(tensor) for tensor in given]))


class _Constants(TorchFunctionMode):
    """Mode that keeps the tensors that are made of numbers, which no operator shows on meta."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and not tensors_in((args, kwargs)):
            # The default number format may be another one when the call is repeated.
            self._recorder.note(func, args, {**(kwargs or {}), "dtype": result.dtype}, [], result)
        return result
