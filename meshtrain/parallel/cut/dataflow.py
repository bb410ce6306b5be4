"""Which tensors of a forward pass are computed from which others."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from meshtrain.compat.autograd import OperatorMode, memory_of, tensors_in

# They look at the shape of what they are given, not at its values.
SHAPE_ONLY = {
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
}


class DerivedTensors(OperatorMode):
    """While active, knows all that is computed from some tensors.

    Not autograd: it loses track where a model computes without gradients. Memory and not tensors is remembered, since
    a tensor may be changed through a view of it.
    """

    def __init__(self) -> None:
        super().__init__()
        # The tensors are kept so that none of their memory is given to another.
        self._tensors: dict[int, Tensor] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Follow these from here on."""
        self._tensors.update((memory_of(tensor), tensor) for tensor in tensors)

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Follow these no longer; what was computed from them is still followed."""
        for tensor in tensors:
            self._tensors.pop(memory_of(tensor), None)

    def has(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is one of those that are followed, or computed from one."""
        return memory_of(tensor) in self._tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name().partition(".")[0] not in SHAPE_ONLY and any(map(self.has, tensors_in((args, kwargs)))):
            self.add(tensors_in(result))
        return result
