"""Which tensors of a forward pass are computed from which others."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# They look at the shape of what they are given, not at its values.
SHAPE_ONLY = {
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
}


class Descendants(TorchDispatchMode):
    """While active, knows all that is computed from some tensors.

    Not autograd: it loses track where a model computes without gradients. Memory and not tensors is remembered, since
    a tensor may be changed through a view of it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The tensors are kept so that none of their memory is given to another.
        self._tensors: dict[int, Tensor] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Follow these from here on."""
        self._tensors.update((_memory(tensor), tensor) for tensor in tensors)

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Follow these no longer; what was computed from them is still followed."""
        for tensor in tensors:
            self._tensors.pop(_memory(tensor), None)

    def has(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is one of those that are followed, or computed from one."""
        return _memory(tensor) in self._tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name().partition(".")[0] not in SHAPE_ONLY and any(map(self.has, tensors_in((args, kwargs)))):
            self.add(tensors_in(result))
        return result


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in any nest of lists, dicts and model outputs."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
