"""Track which tensors of a forward pass are computed from which others."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from meshtrain.compat.autograd import OperatorMode, memory_of, tensors_in

# Operators that use only the shape of their input, so their results do not depend on its values.
SHAPE_ONLY = {
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
}


class DerivedTensors(OperatorMode):
    """Dispatch mode that tracks all tensors that are computed from some given tensors.

    Autograd cannot do this: it loses track where a model computes without gradients. The mode
    tracks memory instead of tensor objects, because a tensor may be changed through a view.
    """

    def __init__(self) -> None:
        super().__init__()
        # The tensors are kept alive, so that their memory is not reused for others.
        self._tensors: dict[int, Tensor] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Track these tensors from now on."""
        self._tensors.update((memory_of(tensor), tensor) for tensor in tensors)

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Stop tracking these tensors; those computed from them are still tracked."""
        for tensor in tensors:
            self._tensors.pop(memory_of(tensor), None)

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is tracked: it was added, or computed from a tracked one."""
        return memory_of(tensor) in self._tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name().partition(".")[0] not in SHAPE_ONLY and any(map(self.has, tensors_in((args, kwargs)))):
            self.add(tensors_in(result))
        return result
