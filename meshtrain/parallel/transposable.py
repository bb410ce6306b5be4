"""Collectives with gradients, on plain tensors.

Each is one function from tensor to tensor; its backward pass is the transposed collective. The
functions wait for their results, so that no asynchronous tensor reaches a compiled block, where
torch silently loses gradients. Those that only post a sum are for gradients that `await_posted`
awaits.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshtrain.compat.autograd import holders_of, keeps_selected_results, number_of_backward_pass
from meshtrain.compat.operators import collectives as operators

Collective = Callable[[Tensor, ProcessGroup], Tensor]


def gather_along(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Join the tensors of all processes along a dimension, without a gradient."""
    stacked = operators.wait_tensor(operators.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))
    return torch.cat(stacked.chunk(group.size()), dim)


def scatter_along(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this process's part of the sum over all processes, without a gradient."""
    return operators.wait_tensor(_post_scatter(x, dim, group))


def post_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Do the same, but do not wait for the sum; see `await_posted`."""
    return _posted.add(_post_scatter(x, dim, group))


def _post_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    stacked = torch.cat(x.chunk(group.size(), dim))
    return operators.reduce_scatter_tensor(stacked, "sum", group.size(), group.group_name)


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over all processes, without a gradient."""
    return operators.wait_tensor(_post_sum(x, group))


def _post_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    return operators.all_reduce(x.contiguous(), "sum", group.group_name)


def sum_result(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of a result that the caller has just computed, and that nobody else has seen.

    It takes the place of `x` in memory, unless what computed `x` has kept it for a backward pass.
    """
    if _may_overwrite() and holders_of(x)[-1] == _holders_alone()[-1]:
        return _sum_in_place(x, group)
    return sum_over(x, group)


def sum_gradient(gradient: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of a gradient in a backward pass.

    It takes the place of the gradient in memory, if nothing else has a reference to that.
    """
    if _may_overwrite() and holders_of(gradient) == _holders_alone():
        return _sum_in_place(gradient, group)
    return sum_over(gradient, group)


def post_gradient(gradient: Tensor, group: ProcessGroup) -> Tensor:
    """Do the same, but do not wait for the sum; see `await_posted`."""
    if _may_overwrite() and gradient.is_contiguous() and holders_of(gradient) == _holders_alone():
        operators.all_reduce_(gradient, "sum", group.group_name)
        return _posted.add(gradient)
    return _posted.add(_post_sum(gradient, group))


def _may_overwrite() -> bool:
    # A compiler plans memory itself, and a selective recomputation knows messages by their
    # operator.
    return not torch.compiler.is_compiling() and not keeps_selected_results()


def _sum_in_place(x: Tensor, group: ProcessGroup) -> Tensor:
    if not x.is_contiguous():
        return sum_over(x, group)
    operators.wait_tensor(operators.all_reduce_(x, "sum", group.group_name))
    return x


class _Posted:
    """The sums that are posted and not awaited.

    A backward pass that ends with an exception leaves its sums. torch would keep their memory until
    somebody waits for them. A pass that runs inside another waits for the sums of that one early.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, Tensor]] = []

    def add(self, posted: Tensor) -> Tensor:
        """Add a sum of the running backward pass, and return it. Wait for those of other passes."""
        number = number_of_backward_pass()
        left = [it for other, it in self._sums if other != number]
        self._sums = [*(it for it in self._sums if it[0] == number), (number, posted)]
        for it in left:
            operators.wait_tensor(it)
        return posted

    def wait(self, posted: Tensor) -> None:
        """Wait for a sum."""
        operators.wait_tensor(posted)
        self._sums = [(number, it) for number, it in self._sums if it is not posted]


_posted = _Posted()


class _Awaited(torch.autograd.Function):
    """Passes a tensor on, and waits for its gradient, whose sum was only posted."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        # With `create_graph` nothing is only posted.
        if not torch.is_grad_enabled():
            _posted.wait(gradient)
        return gradient


def await_posted(x: Tensor) -> Tensor:
    """Return `x` for a collective that only posts the gradient. What comes before it sees the sum.

    Nothing else may use the result. Nodes that are made between the two run while the gradient
    travels.
    """
    passed: Tensor = _Awaited.apply(x)  # type: ignore[no-untyped-call]
    return passed


class _Pair(NamedTuple):
    """A collective and its transposed one.

    Attributes:
        there: the collective of the forward pass.
        back: that of the backward pass.
        in_graphs: both, as the graph of a backward pass has them. Other nodes may hold the same
            tensors there, so these change nothing in place and wait for their results.
    """

    there: Collective
    back: Collective
    in_graphs: tuple[Collective, Collective]


class _Transposable(torch.autograd.Function):
    """A collective whose backward pass is the transposed collective, which has a gradient too."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, group: ProcessGroup, pair: _Pair) -> Tensor:
        ctx.group, ctx.pair = group, pair  # type: ignore[attr-defined]
        result = pair.there(x, group)
        if not torch.compiler.is_compiling() and result is x:
            # Without it, the result would be a view, which a model may not change in place.
            ctx.mark_dirty(x)
        return result

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        group, pair = ctx.group, ctx.pair  # type: ignore[attr-defined]
        # `create_graph=True` needs a derivative of the backward pass. The functional collectives of
        # torch have none and do not report it. Without `create_graph` the plain collective is
        # cheaper, and it can be compiled.
        if torch.is_grad_enabled():
            there, back = pair.in_graphs
            return _apply(gradient, group, _Pair(back, there, (back, there))), None, None
        return pair.back(gradient, group), None, None


_apply: Callable[[Tensor, ProcessGroup, _Pair], Tensor] = _Transposable.apply


def pair_of(
    forward: Collective, transposed: Collective, *, in_graphs: tuple[Collective, Collective] | None = None
) -> tuple[Collective, Collective]:
    """Return two functions, each of which is the backward pass of the other.

    So gradients have gradients too.

    Args:
        forward: the collective of the first function.
        transposed: that of the second.
        in_graphs: what takes their places in the graph of a backward pass, if one of them changes
            its argument or does not wait for its result.
    """
    there = _Pair(forward, transposed, in_graphs or (forward, transposed))
    back = _Pair(transposed, forward, there.in_graphs[::-1])

    def one(x: Tensor, group: ProcessGroup) -> Tensor:
        return _apply(x, group, there)

    def other(x: Tensor, group: ProcessGroup) -> Tensor:
        return _apply(x, group, back)

    return one, other


def prepare_sums() -> None:
    """Count the references that decide whether a sum may be in place.

    Otherwise the first sum counts them, once in a process. A simulation would record the operators
    of that, and the next one in the process would not.
    """
    _holders_alone()


@cache
def _holders_alone() -> tuple[int, int, int]:
    """Return the references to a gradient in a backward pass that nothing else holds.

    Python and torch have some themselves, so their number is measured.
    """
    found = []

    def look(gradient: Tensor, group: ProcessGroup) -> Tensor:
        found.append(holders_of(gradient))
        return gradient

    with torch.inference_mode(mode=False), torch.enable_grad():
        x = torch.zeros(1, requires_grad=True, device="cpu")
        pass_on, _ = pair_of(lambda x, group: x.view_as(x), look)
        passed = pass_on(x, cast(ProcessGroup, None))
        (2 * passed + 3 * passed).backward()
    return found[0]
