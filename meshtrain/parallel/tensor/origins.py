"""Track which tensors are parts of the heads, and which parameters the full ones come from.

A pass on the meta device runs with this mode, and notes what it finds out about full parameters.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from meshtrain.compat.autograd import OperatorMode, memory_of, tensors_in
from meshtrain.parallel.cut.meta import SHAPE_ONLY
from meshtrain.parallel.tensor.rules import TensorRules
from meshtrain.parallel.tensor.styles import STYLES

# Styles of full parameters whose partial gradients are summed over tp.
SUMMED_STYLES = frozenset(name for name, row in STYLES.items() if row.gradients == "partial" or row.sums_outputs)
# Stands for tensors that are full on every process and whose gradient nothing would sum.
HIDDEN_STATES = ""
Origins = frozenset[str]


@dataclass
class Flow:
    """How full parameters are used on parts of the heads, and which rules cannot be followed.

    Attributes:
        on_parts: modules with full parameters that are called with a part of the heads or of a
            width.
        partial: modules whose parameters get a partial gradient that the rules do not sum, and such
            parameters of blocks; `HIDDEN_STATES` if the hidden states themselves get one.
        counted_twice: modules and parameters of blocks whose gradient is complete, although the
            rules sum it.
        mixed: modules and parameters of blocks that are used on parts and on full tensors.
        per_head: modules that have parameters of their own for each head.
        joint: modules that compute over several heads at once.
        unentered: blocks that share an input, with a projection of something else inside.
        leaking: blocks that share an input and return a part.
        misused: sharded modules whose weight the model uses without calling them.
        replaced: modules that the forward pass of the model replaces by new ones.
        failure: why the pass did not finish; None if it did.
        ran: whether the layers run on the meta device at all; if not, nothing is known.
    """

    on_parts: dict[str, None] = field(default_factory=dict)
    partial: dict[str, None] = field(default_factory=dict)
    counted_twice: dict[str, None] = field(default_factory=dict)
    mixed: dict[str, None] = field(default_factory=dict)
    per_head: dict[str, None] = field(default_factory=dict)
    joint: dict[str, None] = field(default_factory=dict)
    unentered: dict[str, None] = field(default_factory=dict)
    leaking: dict[str, None] = field(default_factory=dict)
    misused: dict[str, None] = field(default_factory=dict)
    replaced: dict[str, None] = field(default_factory=dict)
    failure: str | None = None
    ran: bool = True


class Parts(OperatorMode):
    """Dispatch mode that tracks which tensors are parts.

    For the other tensors it tracks the full parameters that they are computed from.
    """

    def __init__(self, flow: Flow, rules: TensorRules) -> None:
        super().__init__()
        self.flow, self.rules = flow, rules
        # Parameters of blocks, by name -> their block.
        self.blocks: dict[str, str] = {}
        self.used_on_parts: Origins = frozenset()
        # Those of tensors whose gradient is complete where they go: to the results of the layer, or
        # to what sums the gradient of its input.
        self.used_in_full: Origins = frozenset()
        # The tensors are kept alive, so that their memory is not reused for others.
        self._parts: dict[int, Tensor] = {}
        self._origins: dict[int, tuple[Tensor, Origins]] = {}
        self._sharded: dict[int, tuple[Tensor, str]] = {}

    def add_part(self, tensor: Tensor) -> Tensor:
        self._parts[memory_of(tensor)] = tensor
        return tensor

    def add_full(self, tensor: Tensor, *origins: str) -> Tensor:
        self._origins[memory_of(tensor)] = tensor, frozenset(origins)
        return tensor

    def add_sharded(self, tensor: Tensor, name: str) -> None:
        self._sharded[memory_of(tensor)] = tensor, name

    def is_part(self, tensor: Tensor) -> bool:
        return memory_of(tensor) in self._parts

    def leave(self, *tensors: Tensor) -> None:
        """Note that tensors leave the layer, or enter what sums the gradient of its input."""
        self.used_in_full |= self._origins_of(tensors)

    def is_summed(self, origin: str) -> bool:
        """Return whether the rules sum the gradient of a module or a parameter of a block."""
        style = self.rules.styles.get(self.blocks.get(origin, origin))
        return origin in self.rules.summed or style in SUMMED_STYLES

    def _origins_of(self, tensors: Iterable[Tensor]) -> Origins:
        found = (self._origins[key][1] for key in map(memory_of, tensors) if key in self._origins)
        return frozenset[str]().union(*found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition(".")[0] in SHAPE_ONLY:
            return func(*args, **(kwargs or {}))
        inputs = tensors_in((args, kwargs))
        for tensor in inputs:
            if (sharded := self._sharded.get(memory_of(tensor))) is not None:
                self.flow.misused[sharded[1]] = None
        origins = self._origins_of(inputs)
        is_part = any(map(self.is_part, inputs))
        if is_part:
            self.used_on_parts |= origins
            # Sorted, because the order of a set differs between processes.
            undeclared = (name for name in sorted(origins) if not self.is_summed(name))
            self.flow.partial.update(dict.fromkeys(undeclared))
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            if is_part:
                self.add_part(tensor)
                self._origins.pop(memory_of(tensor), None)
            elif origins and tensor.is_floating_point():
                # Integer tensors, such as indices, pass no gradient back.
                self.add_full(tensor, *origins)
        return result
