"""torch's autograd and dispatcher: what a tensor is over, what is done to it, and when a backward pass ends."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

T = TypeVar("T", bound=Tensor)


class OperatorMode(TorchDispatchMode):
    """A mode of torch that sees every operator while it is active, in `__torch_dispatch__`.

    Why: torch documents the class, and keeps it in a private module.
    Holds: torch 2.11 to 2.13.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in any nest of lists, dicts and model outputs.

    Why: transformers makes its outputs known to this module of torch, which has no public name.
    Holds: torch 2.11 to 2.13.
    """
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Return the same nest of lists, dicts and model outputs, with `function` of every tensor.

    Why: as for `tensors_in`.
    Holds: torch 2.11 to 2.13.
    """
    return tree_map_only(Tensor, function, values)


def number_of_backward_pass() -> int:
    """Return a number that the backward pass which is running has alone; -1 outside of one.

    Why: hooks must tell a new backward pass from one that has ended with an exception.
    Holds: torch 2.11 to 2.13.
    """
    return torch._C._current_graph_task_id()


def when_backward_ends(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that is running has computed all gradients.

    Why: torch has public hooks for the end of one gradient, and none for the end of all. FSDP2 and DDP do the same.
    Holds: torch 2.11 to 2.13.
    """
    Variable._execution_engine.queue_callback(function)


def times_changed(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place.

    Why: whether a model writes into what its embedding gives is seen only here; meta tensors have no values.
    Holds: torch 2.11 to 2.13.
    """
    return tensor._version


def memory_of(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor from that of others, on the meta device too.

    Why: `data_ptr` is 0 for everything on the meta device.
    Holds: torch 2.11 to 2.13.
    """
    return tensor.untyped_storage()._cdata


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Tell whether hooks were put on the gradient of a tensor.

    Why: they would see the gradient of one rank, and torch has no public way to ask for them.
    Holds: torch 2.11 to 2.13.
    """
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def tensor_over(kind: type[T], data: Tensor, *, requires_grad: bool) -> T:
    """Return a tensor of a class over the memory of another tensor.

    Why: `nn.Parameter` does the same in its constructor; a class that derives from it has no public way.
    Holds: torch 2.11 to 2.13.
    """
    return Tensor._make_subclass(kind, data, requires_grad)


def tensor_without_memory(kind: type[T], shape: Sequence[int], dtype: torch.dtype) -> T:
    """Return a tensor of a class that has a shape and a number format, says it is on the CPU, and has no memory.

    Why: torch documents this for tensors that are made in `__torch_dispatch__`, under a private name.
    Holds: torch 2.11 to 2.13.
    """
    return Tensor._make_wrapper_subclass(kind, tuple(shape), dtype=dtype, device=torch.device("cpu"))
