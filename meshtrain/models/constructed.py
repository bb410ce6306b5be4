"""Find out with which values the constructor of a model fills its parameters and buffers.

Some classes have no initialization rule for a tensor: the values that its constructor drew stay. On
the meta device a constructor runs without values. So its operators are recorded, and those that
lead to one tensor are repeated on the CPU.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshtrain.compat.autograd import OperatorMode, map_tensors, memory_of, tensors_in


class _Operation(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any


class ConstructedTensors:
    """The parameters and buffers of a model as its constructor fills them.

    Args:
        build: builds the model on the meta device.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        recorder = _Recorder()
        with recorder:
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
        real: dict[int, Tensor] = {}

        def to_real(tensor: Tensor) -> Tensor:
            return real.get(id(tensor), tensor)

        for operation in self._leading_to(wanted):
            args, kwargs = map_tensors(to_real, (operation.args, dict(operation.kwargs)))
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("cpu")
            result = operation.function(*args, **kwargs)
            real.update(
                (id(meta), it) for meta, it in zip(tensors_in(operation.result), tensors_in(result), strict=True)
            )
        return next(
            real[id(meta)]
            for operation in self._operations
            for meta in tensors_in(operation.result)
            if memory_of(meta) == memory_of(wanted) and meta.shape == wanted.shape and id(meta) in real
        )

    def _leading_to(self, wanted: Tensor) -> list[_Operation]:
        needed, found = {memory_of(wanted)}, []
        for operation in reversed(self._operations):
            operands = tensors_in((operation.args, operation.kwargs))
            if any(memory_of(tensor) in needed for tensor in tensors_in(operation.result)):
                needed.update(map(memory_of, operands))
                found.append(operation)
        return found[::-1]


class _Recorder(OperatorMode):
    """Dispatch mode that keeps all operators, and with them the tensors of the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if tensors_in(result):
            self.operations.append(_Operation(func, args, kwargs or {}, result))
        return result
