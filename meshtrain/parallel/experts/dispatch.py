"""The exchange of tokens around stacked experts, each of which lies whole on one rank of ep.

A token is sent to the rank of each of its experts, as one row. The stock experts compute these
rows, and the results travel back. Routers and shared experts stay as they are, and no token is
dropped.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshtrain.compat.fake import has_values
from meshtrain.compat.nn import mix_in
from meshtrain.compat.operators import collectives as operators
from meshtrain.config.mesh import EP, TP
from meshtrain.parallel.experts.stacks import expert_stacks
from meshtrain.parallel.tensor.modules import LocalParameters, see_local_parameters
from meshtrain.parallel.transposable import pair_of
from meshtrain.runtime.mesh import axis_size


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave each rank of ep its share of all stacked experts, in place.

    Args:
        model: a stage on the meta device, already sharded over tp.
        mesh: all axes.
    """
    for stack in expert_stacks(model).values():
        for kind, parameter in list(stack.named_parameters(recurse=False)):
            shards = _divided(parameter, mesh)
            stack.register_parameter(kind, nn.Parameter(shards, requires_grad=parameter.requires_grad))
        stack.num_experts = stack.num_experts // axis_size(mesh, EP)  # type: ignore[operator,assignment]
        if not isinstance(stack, LocalParameters):
            see_local_parameters(stack)
        mix_in(stack, Dispatched, group=mesh.get_group(EP))


def _divided(parameter: Tensor, mesh: DeviceMesh) -> Tensor:
    over_tp = parameter.placements if isinstance(parameter, DTensor) else ()
    where = mesh[(EP, TP)] if over_tp else mesh[EP]
    full = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return distribute_tensor(full, where, [Shard(0), *over_tp], src_data_rank=None)


class Dispatched:
    """Mixin for stacked experts of which this rank holds a share.

    Attributes:
        group: the ranks of ep, which hold the experts in order.
        num_experts: on this rank.
    """

    group: ProcessGroup
    num_experts: int
    parameters: Callable[[], Iterator[nn.Parameter]]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Compute (tokens, hidden) with the experts that the router has chosen, on all ranks.

        Args:
            hidden: (tokens, hidden)
            index: (tokens, k) of the experts, counted over all ranks.
            weights: (tokens, k) of their results.
        """
        route = Route(index, self.num_experts, self.group)
        there, back = route.exchanges()
        rows = there(hidden[route.order // index.shape[-1]], self.group)
        results = self._compute(rows, route.experts_of_rows())
        ordered = back(results, self.group)
        by_choice = ordered[route.order.argsort()].view(*index.shape, -1)
        return (by_choice * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _compute(self, rows: Tensor, experts: Tensor) -> Tensor:
        if not len(rows):
            # The stock experts would return a tensor without a graph. This rank would then miss the
            # exchanges of the backward pass, and the others would wait for it forever.
            trains = torch.is_grad_enabled() and any(it.requires_grad for it in self.parameters())
            return rows if rows.requires_grad else rows.requires_grad_(trains)
        ones = torch.ones_like(experts, dtype=rows.dtype)
        return super().forward(rows, experts, ones)  # type: ignore[misc]


class Route:
    """Which rows travel between the ranks in one pass.

    Args:
        index: (tokens, k) of the experts that the router has chosen, counted over all ranks.
        num_experts: on each rank.
        group: the ranks of ep.

    Attributes:
        order: (tokens * k) the choices, sorted by expert.
    """

    def __init__(self, index: Tensor, num_experts: int, group: ProcessGroup) -> None:
        ranks = group.size()
        chosen = index.flatten()
        self.order = chosen.argsort(stable=True)
        # The host would wait for the device in `bincount`.
        counts = torch.zeros(ranks * num_experts, dtype=torch.long, device=chosen.device)
        sent = counts.index_add(0, chosen, torch.ones_like(chosen)).view(ranks, num_experts)
        self._received = _move(sent, group, send=[1] * ranks, receive=[1] * ranks)
        self._send, self._receive = _row_counts(sent, self._received, len(chosen))

    def exchanges(self) -> tuple[Any, Any]:
        """Return the collectives that send rows to the experts and their results back."""
        return pair_of(
            partial(_move, send=self._send, receive=self._receive),
            partial(_move, send=self._receive, receive=self._send),
        )

    def experts_of_rows(self) -> Tensor:
        """Return (rows, 1) the expert of each row that came, counted on this rank."""
        ranks, number = self._received.shape
        experts = torch.arange(number, device=self._received.device).repeat(ranks)
        return experts.repeat_interleave(self._received.flatten(), output_size=sum(self._receive)).unsqueeze(-1)


def _row_counts(sent: Tensor, received: Tensor, total: int) -> tuple[list[int], list[int]]:
    """Return how many rows this rank sends to each rank, and how many it gets.

    This is the one time that the host waits for the device.

    Args:
        sent: (ranks, experts) rows for each expert of each rank.
        received: (ranks, experts) rows of each rank for each expert of this one.
        total: number of rows that this rank sends.
    """
    ranks = len(sent)
    if not has_values(sent):
        # Tensors of a simulation have no values. It assumes that all experts get the same.
        even = [total // ranks + (rank < total % ranks) for rank in range(ranks)]
        return even, even
    send, receive = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    return send, receive


def _move(x: Tensor, group: ProcessGroup, *, send: list[int], receive: list[int]) -> Tensor:
    """Send the first rows to the first rank and so on, and return what came in the same order."""
    return operators.wait_tensor(operators.all_to_all_single(x.contiguous(), receive, send, group.group_name))
