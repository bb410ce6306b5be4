"""Let models run on the meta device where they read values, which it does not have."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshtrain.compat.autograd import OperatorMode, tensors_in

# Operators that use only the shape of their input, so their results do not depend on its values.
SHAPE_ONLY = {
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
}


class WithoutValues(OperatorMode):
    """Dispatch mode in which operators run on meta that torch does not support there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known, result = result_without_values(func, args)
        return result if known else func(*args, **(kwargs or {}))


@contextmanager
def states_restored(model: nn.Module) -> Iterator[None]:
    """Undo what the modules of a model keep from passes inside the block, such as their last state.

    Such a tensor has a graph, with which a model cannot be copied.
    """
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, old in before:
            kept = [name for name, value in attributes.items() if value is not old.get(name) and tensors_in(value)]
            for name in kept:
                del attributes[name]
            attributes.update({name: old[name] for name in kept if name in old})


def _dim_of(args: Any) -> int:
    return args[2] if len(args) > 2 else 0


class KnownLists(TorchFunctionMode):
    """Mode in which lists of numbers can be read from the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist and args[0].is_meta:
            return torch.ones(args[0].shape, dtype=args[0].dtype).tolist()
        return func(*args, **(kwargs or {}))


def result_without_values(func: Any, args: Any) -> tuple[bool, Any]:
    """Return whether an operator is one of these, and its result."""
    match func.name():
        case "aten::_local_scalar_dense" if args[0].is_meta:
            # Any value will do, since only shapes matter: 1, which is also true.
            return True, torch.ones((), dtype=args[0].dtype).item()
        case "aten::split_with_sizes" if args[0].is_meta and sum(args[1]) != args[0].shape[_dim_of(args)]:
            # Sizes that the model has read from meta (tokens per expert): the first gets all.
            size = args[0].shape[_dim_of(args)]
            return True, args[0].split_with_sizes([size, *[0] * (len(args[1]) - 1)], _dim_of(args))
        case "aten::_grouped_mm" if args[0].is_meta:
            # On meta torch takes bfloat16 only.
            return True, args[0].new_empty(*args[0].shape[:-1], args[1].shape[-1])
    return False, None
