"""Gradients of weights that are computed while the gradients of their inputs are summed over tp.

The backward pass of a projection consists of two products. Other processes need only the gradient
of the input. So it is computed first, for all projections that read this input, and its sum is
posted. The gradients of the weights are computed while it travels.

Autograd keeps this order by itself: of the nodes that are ready, it runs the newest first. A block
makes, in its forward pass, a node that awaits the sum, one for each weight, and one that posts the
sum, in this order. A projection hands the factors of the gradient to the node of its weight, and
zeros in place of a gradient.

Source: Megatron-LM (arXiv:1909.08053), whose `LinearWithGradAccumulationAndAsyncCommunication`
computes the gradient of one weight in this time.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtrain.compat.autograd import number_of_backward_pass, will_run
from meshtrain.compat.dtensor import local_in_graph
from meshtrain.compat.operators import rows_as
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.tensor.region import Region
from meshtrain.parallel.transposable import await_posted

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Multiplies an input by a weight as its module has it, and adds a bias if there is one."""


class _Factors:
    """The factors of the gradient of a weight, from the product to the node of the weight.

    Attributes:
        is_transposed: whether the weight is (in, out).
        are_awaited: whether the weight has such a node.
    """

    def __init__(self, *, is_transposed: bool, are_awaited: bool) -> None:
        self.is_transposed, self.are_awaited = is_transposed, are_awaited
        # By backward pass: a hook may run another pass through the same graph.
        self._found: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, x: Tensor, gradient: Tensor) -> None:
        self._found[number_of_backward_pass()] = x, gradient

    def multiply(self, given: Tensor) -> Tensor:
        """Return the gradient of the weight, given what else has arrived for it."""
        found = self._found.pop(number_of_backward_pass(), None)
        # The zeros of `_Multiply` have no memory. A derivative of the backward pass adds to them.
        is_added = any(given.stride())
        assert found is not None or is_added, "the factors of a gradient are lost"
        if found is None:
            return given
        late = self.product(*found)
        return late + given if is_added else late

    def product(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of the weight from an input and the gradient of its product."""
        return x.T @ gradient if self.is_transposed else gradient.T @ x


class _Multiply(torch.autograd.Function):
    """A product that leaves the gradient of its weight to the node of the weight, if it has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, factors: _Factors) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factors = factors
        return F.linear(x, weight.T if factors.is_transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x, weight), factors = ctx.saved_tensors, ctx.factors
        needs_input, _, needs_bias, _ = ctx.needs_input_grad
        of_input = gradient @ (weight.T if factors.is_transposed else weight) if needs_input else None
        of_bias = gradient.sum(0) if needs_bias else None
        if not will_run(ctx.next_functions[1][0]):
            return of_input, None, of_bias, None
        # With `create_graph` nothing is posted, and factors with a graph of their own would keep
        # themselves alive.
        if torch.is_grad_enabled() or not factors.are_awaited:
            return of_input, factors.product(x, gradient), of_bias, None
        factors.keep(x, gradient)
        return of_input, gradient.new_zeros(()).expand(weight.shape), of_bias, None


class LateWeight:
    """Mixin for a sharded projection, whose weight may get its gradient late.

    Attributes:
        is_columnwise: whether its outputs are sharded. The gradient of its input is partial then,
            and is summed where the input enters it or its block.
        entrance: of the block; None if the gradient is never late.
        product: multiplies by the shard.
        is_transposed: whether the weight is (in, out).
    """

    is_columnwise = False
    entrance: "Entrance | None" = None
    product: Product
    is_transposed: ClassVar[bool]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply an input (batch, seq, in) by the weight, and add a bias."""
        entrance = None if torch.compiler.is_compiling() else self.entrance
        if entrance is None or not self.may_be_late(x):
            return self.product(x, local_tensor(self.weight), bias)  # type: ignore[attr-defined]
        weight, factors = entrance.take(self)
        rows: Tensor = _Multiply.apply(x.reshape(-1, x.shape[-1]), weight, bias, factors)  # type: ignore[no-untyped-call]
        return rows_as(rows, (*x.shape[:-1], rows.shape[-1]))

    def may_be_late(self, x: Tensor) -> bool:
        """Return whether the gradient may be late in a product with `x`.

        The weight must train, and the product be that of its class.
        """
        weight: Any = self.weight  # type: ignore[attr-defined]
        trains = torch.is_grad_enabled() and isinstance(weight, DTensor) and weight.requires_grad
        return trains and "product" not in vars(self) and not _is_autocast(x)


def _is_autocast(x: Tensor) -> bool:
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


class Entrance:
    """The edge where a block of column-wise projections receives its hidden states.

    Args:
        region: around the block.
        block: has the projections; or is one.
    """

    def __init__(self, region: Region, block: nn.Module) -> None:
        self._region, self._block = region, block
        self._projections: list[LateWeight] | None = None
        # For the projections of the latest pass that have had no product.
        self._ready: dict[LateWeight, tuple[Tensor, _Factors]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Return the full hidden states for the projections."""
        if torch.compiler.is_compiling() or not self._region.posts_sums:
            return self._region.enter(x)
        self._ready.clear()
        projections = self._late(x) if x.requires_grad else []
        if not projections:
            return self._region.enter(x)
        x = await_posted(x)
        for projection in projections:
            factors = _Factors(is_transposed=projection.is_transposed, are_awaited=True)
            self._ready[projection] = local_in_graph(projection.weight, factors.multiply), factors  # type: ignore[attr-defined]
        return self._region.enter(x, posts=True)

    def take(self, projection: LateWeight) -> tuple[Tensor, _Factors]:
        """Return the local weight of a projection for one product, and where its factors go.

        Only the first product after the entrance has a late gradient. Others keep the same tensors,
        as a checkpoint inside the block demands, whose recomputation has no entrance.
        """
        if (ready := self._ready.pop(projection, None)) is not None:
            return ready
        factors = _Factors(is_transposed=projection.is_transposed, are_awaited=False)
        return local_tensor(projection.weight), factors  # type: ignore[attr-defined]

    def _late(self, x: Tensor) -> list[LateWeight]:
        if self._projections is None:
            modules = self._block.modules()
            self._projections = [it for it in modules if isinstance(it, LateWeight) and it.is_columnwise]
            for it in self._projections:
                it.entrance = self
        return [it for it in self._projections if it.may_be_late(x)]
