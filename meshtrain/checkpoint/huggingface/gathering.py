"""Whole tensors on one process, one after the other, from the blocks that lie on many.

The blocks travel in host memory from process to process, and only to the process that wants the whole: a device has no
room to spare for it, and DTensor's own `full_tensor` gives it to all.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from meshtrain.models.layout import holders_of, local_tensor


@torch.no_grad()
def gather_block_by_block(
    tensor: Tensor, whole: Tensor | None, *, dtype: torch.dtype, leader: int, group: ProcessGroup
) -> None:
    """Fill `whole` on the leader from the blocks of a tensor. All processes of its mesh call it together.

    Args:
        tensor: what lies here, on any device.
        whole: (as `tensor`) on the CPU, on the leader; None elsewhere.
        dtype: the number format of `whole`; blocks are cast before they travel.
        leader: the rank that wants it; of processes on whose mesh it is not, nothing is asked.
        group: of all processes, over gloo.
    """
    rank = dist.get_rank()
    for holder, ranges in _holders(tensor, leader):
        if whole is not None:
            place = whole[tuple(ranges)]
            if holder == leader:
                place.copy_(local_tensor(tensor))
            else:
                receive(place, holder, group)
        elif holder == rank:
            send(local_tensor(tensor).to("cpu", dtype), leader, group)


def send(tensor: Tensor, rank: int, group: ProcessGroup) -> None:
    """Send a tensor on the CPU."""
    dist.send(_bytes(tensor.contiguous()), rank, group)


def receive(tensor: Tensor, rank: int, group: ProcessGroup) -> None:
    """Fill a tensor on the CPU, which need not be contiguous, with what is sent."""
    if tensor.is_contiguous():
        dist.recv(_bytes(tensor), rank, group)
        return
    block = torch.empty(tensor.shape, dtype=tensor.dtype)
    dist.recv(_bytes(block), rank, group)
    tensor.copy_(block)


def _holders(tensor: Tensor, leader: int) -> list[tuple[int, list[slice]]]:
    if isinstance(tensor, DTensor):
        # Copies of the model hold the same blocks.
        return holders_of(tensor) if leader in tensor.device_mesh.mesh else []
    return [(leader, [slice(0, size) for size in tensor.shape])]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
