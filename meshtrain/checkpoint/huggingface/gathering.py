"""Gather one full tensor at a time on one process, from the blocks that many processes hold.

The blocks are sent in host memory, and only to the process that needs the full tensor. A device may
not have enough memory for it, and DTensor's own `full_tensor` returns it on all processes.
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
    """Fill `whole` on the leader from the blocks of a tensor. All processes of its mesh call it.

    Args:
        tensor: the block of this process, on any device.
        whole: (shape of `tensor`) full tensor on the CPU, on the leader; None elsewhere.
        dtype: number format of `whole`. Blocks are cast before they are sent.
        leader: the rank that gathers the tensor. Processes whose mesh does not contain it send
            nothing.
        group: all processes, over gloo.
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
    """Receive into a tensor on the CPU, which need not be contiguous."""
    if tensor.is_contiguous():
        dist.recv(_bytes(tensor), rank, group)
        return
    block = torch.empty(tensor.shape, dtype=tensor.dtype)
    dist.recv(_bytes(block), rank, group)
    tensor.copy_(block)


def _holders(tensor: Tensor, leader: int) -> list[tuple[int, list[slice]]]:
    if isinstance(tensor, DTensor):
        # Copies of the model hold the same blocks, so only the mesh of the leader is needed.
        return holders_of(tensor) if leader in tensor.device_mesh.mesh else []
    return [(leader, [slice(0, size) for size in tensor.shape])]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
