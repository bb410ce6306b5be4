"""Private parts of torch's autograd and dispatcher: operators, backward passes, tensor memory."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.fx.experimental import _config as fx_config
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

T = TypeVar("T", bound=Tensor)


class OperatorMode(TorchDispatchMode):
    """A mode of torch that sees every operator while it is active, in `__torch_dispatch__`.

    Why: torch documents the class, but keeps it in a private module.
    Holds: torch 2.11 to 2.13.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


class UncompiledMode(OperatorMode):
    """A mode for code that is never compiled.

    Why: torch switches its compiler off around each call of another mode. That takes longer than
    many of the calls.
    Holds: torch 2.11 to 2.13.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in any nest of lists, dicts and model outputs.

    Why: transformers registers its outputs with this module of torch, which has no public name.
    Holds: torch 2.11 to 2.13.
    """
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def leaves_of(result: Tensor) -> list[Tensor]:
    """Return the tensors whose gradients the backward pass of a result accumulates.

    Why: a node of autograd's graph has its tensor in an attribute that torch does not document.
    Holds: torch 2.11 to 2.13.
    """
    found, seen, waiting = [], set(), [result.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found


def flatten(values: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of any nest of lists, dicts and model outputs, and its structure.

    Why: as for `tensors_in`.
    Holds: torch 2.11 to 2.13.
    """
    return tree_flatten(values)


def unflatten(leaves: Sequence[Any], structure: TreeSpec) -> Any:
    """Return a nest with the structure of another one and these leaves.

    Why: as for `tensors_in`.
    Holds: torch 2.11 to 2.13.
    """
    return tree_unflatten(leaves, structure)


def map_tensors(function: Callable[[Tensor], Any], values: Any) -> Any:
    """Return the same nest of lists, dicts and model outputs with `function` applied to tensors.

    Why: as for `tensors_in`.
    Holds: torch 2.11 to 2.13.
    """
    return tree_map_only(Tensor, function, values)


def all_entries_nonzero() -> AbstractContextManager[None]:
    """Return a context in which `nonzero` of a meta tensor returns all entries.

    Why: the meta device does not know which tokens a router sends where. With this, a pass has the
    shapes that it has if all tokens go to all experts.
    Holds: torch 2.11 to 2.13.
    """
    return fx_config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]


def number_of_backward_pass() -> int:
    """Return the number of the running backward pass; -1 outside of one.

    Why: hooks must distinguish a new backward pass from one that has ended with an exception.
    Holds: torch 2.11 to 2.13.
    """
    return torch._C._current_graph_task_id()


def will_run(node: Any) -> bool:
    """Return whether the running backward pass comes to a node of its graph.

    Why: a custom function knows which of its inputs need a gradient in some pass, but not which
    ones this pass asks for. Hooks of torch on several gradients do the same.
    Holds: torch 2.11 to 2.13.
    """
    return torch._C._will_engine_execute_node(node)


def when_backward_ends(function: Callable[[], None]) -> None:
    """Call a function when the running backward pass has computed all gradients.

    Why: torch has public hooks for one gradient, but none for the end of all. FSDP2 and DDP do the
    same.
    Holds: torch 2.11 to 2.13.
    """
    Variable._execution_engine.queue_callback(function)


def times_changed(tensor: Tensor) -> int:
    """Return the number of times a tensor was changed in place.

    Why: only this shows whether a model writes into the output of its embedding, because meta
    tensors have no values.
    Holds: torch 2.11 to 2.13.
    """
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd counts a tensor as a view of another one.

    Why: such a tensor cannot be detached in place, which zero-bubble schedules do with what a stage
    sends.
    Holds: torch 2.11 to 2.13.
    """
    return tensor._is_view()


def memory_of(tensor: Tensor) -> int:
    """Return a number that identifies the memory of a tensor, on the meta device too.

    Why: `data_ptr` is 0 for everything on the meta device.
    Holds: torch 2.11 to 2.13.
    """
    return tensor.untyped_storage()._cdata


def holders_of(tensor: Tensor) -> tuple[int, int, int]:
    """Return how many references there are to a tensor in Python and in C++, and to its memory.

    Why: only these numbers tell whether anything else would see a change in place.
    Holds: torch 2.11 to 2.13.
    """
    memory = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return sys.getrefcount(tensor), tensor._use_count(), memory  # type: ignore[attr-defined]


def keeps_selected_results() -> bool:
    """Return whether a selective recomputation stores results of chosen operators, or reads them.

    Why: torch has no public way to ask.
    Holds: torch 2.11 to 2.13.
    """
    modes = _get_current_dispatch_mode_stack()
    return any(isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode) for mode in modes)


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether the gradient of a tensor has hooks.

    Why: they would see the gradient of one rank, and torch has no public way to ask for them.
    Holds: torch 2.11 to 2.13.
    """
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def tensor_over(kind: type[T], data: Tensor, *, requires_grad: bool) -> T:
    """Return a tensor of a class over the memory of another tensor.

    Why: `nn.Parameter` does the same in its constructor; a class that derives from it has no public
    way.
    Holds: torch 2.11 to 2.13.
    """
    return Tensor._make_subclass(kind, data, requires_grad)


def tensor_without_memory(kind: type[T], shape: Sequence[int], dtype: torch.dtype) -> T:
    """Return a tensor of a class with a shape and a dtype, on the CPU but without memory.

    Why: torch documents this for tensors that are made in `__torch_dispatch__`, under a private
    name.
    Holds: torch 2.11 to 2.13.
    """
    return Tensor._make_wrapper_subclass(kind, tuple(shape), dtype=dtype, device=torch.device("cpu"))
