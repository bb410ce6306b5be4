"""Bring the parts of matrices together, change each matrix as a whole, and bring the parts back.

Every process of a stage owns some matrices. In a first exchange the owners get the parts of their
matrices, and in a second one all processes get their parts of the results. So each matrix is
computed once, also if all processes hold it whole.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshtrain.compat.operators import collectives as operators
from meshtrain.models.layout import ranges_at
from meshtrain.runtime.mesh import place_on, stage_group

# Numbers of the matrices that a process owns in one exchange; a larger matrix comes alone.
ROUND = 2**24
Block = tuple[slice, slice]
"""Rows and columns of a matrix."""
_Exchange = Callable[[Sequence[Sequence[Tensor]], Sequence[Sequence[int]]], list[Iterator[Tensor]]]


class Matrix(NamedTuple):
    """A matrix, or one of a stack.

    Attributes:
        parameter: the local part that an optimizer has.
        place: of the matrix in the local part, if this process has a part of it.
        shape: of the full matrix.
        blocks: process of the group -> its block, for those that have one.
    """

    parameter: Tensor
    place: tuple[int, ...]
    shape: tuple[int, int]
    blocks: Mapping[int, Block]


class _Owned(NamedTuple):
    """A matrix and its owner.

    Attributes:
        matrix: that is computed.
        owner: number of the process that computes it, in the group.
        sources: the processes that send it their blocks, and the owner if it has a block.
    """

    matrix: Matrix
    owner: int
    sources: tuple[tuple[int, Block], ...]


class _Round(NamedTuple):
    """Matrices that travel together.

    Attributes:
        matrices: those that this process owns or has a part of.
        travels: whether any process sends a part of any matrix.
    """

    matrices: list[_Owned]
    travels: bool


class MatrixExchange:
    """Changes matrices as a whole, on the processes of a stage together.

    Args:
        parameters: the local part that an optimizer has -> the model's parameter. All processes of
            a stage pass the same ones, in the same order. The last two dimensions are a matrix, and
            dimensions before them count matrices.
        mesh: all processes; None: this one is alone.
    """

    def __init__(self, parameters: Mapping[Tensor, Tensor], mesh: DeviceMesh | None) -> None:
        self._mesh, self._group = mesh, None if mesh is None else stage_group(mesh)
        self._device = None if mesh is None else torch.device(mesh.device_type)
        self._ranks = [0] if self._group is None else dist.get_process_group_ranks(self._group)
        self._me = 0 if self._group is None else self._group.rank()
        self._shapes = {local: tuple(full.shape[-2:]) for local, full in parameters.items()}
        self._layouts: dict[tuple[Any, ...], dict[tuple[int, ...], dict[int, Block]]] = {}
        matrices = [it for local, full in parameters.items() for it in self._matrices(local, full)]
        self._rounds = [
            _Round([it for it in found if self._has_part(it) or it.owner == self._me], any(map(_travels, found)))
            for found in _in_rounds(_with_owners(matrices, len(self._ranks)))
        ]

    def shape(self, parameter: Tensor) -> tuple[int, int]:
        """Return the rows and columns of the matrices of a local part, in full."""
        rows, columns = self._shapes[parameter]
        return rows, columns

    def replace(self, values: Mapping[Tensor, Tensor], function: Callable[[Tensor], Tensor]) -> None:
        """Replace matrices by what a function returns for them. Collective over the stage.

        Args:
            values: local part that an optimizer has -> values in its place, which are overwritten.
                All processes of a stage pass the same parameters.
            function: takes and returns (number, rows, columns).
        """
        like = next(iter(values.values()), None)
        if like is None:
            return
        empty = torch.empty(0, dtype=like.dtype, device=self._device or like.device)
        for matrices, travels in self._rounds:
            present = [it for it in matrices if it.matrix.parameter in values]
            parts = {id(it): values[it.matrix.parameter][it.matrix.place] for it in present if self._has_part(it)}
            exchange = partial(self._exchange if travels else self._keep, empty)
            whole = self._gather(present, parts, empty, exchange)
            _change(whole, function)
            self._return(present, parts, whole, exchange)

    def _gather(
        self, present: Sequence[_Owned], parts: Mapping[int, Tensor], empty: Tensor, exchange: _Exchange
    ) -> dict[int, tuple[_Owned, Tensor]]:
        """Return the full matrices that this process owns."""
        send: list[list[Tensor]] = [[] for _ in self._ranks]
        for it in present:
            if it.owner != self._me and any(rank == self._me for rank, _ in it.sources):
                send[it.owner].append(parts[id(it)])
        own = [it for it in present if it.owner == self._me]
        sizes: list[list[int]] = [[] for _ in self._ranks]
        for it in own:
            for rank, block in it.sources:
                if rank != self._me:
                    sizes[rank].append(_size(block))
        received = exchange(send, sizes)
        whole = {}
        for it in own:
            full = empty.new_empty(it.matrix.shape)
            for rank, block in it.sources:
                part = parts[id(it)] if rank == self._me else next(received[rank])
                full[block].copy_(part.view(full[block].shape))
            whole[id(it)] = (it, full)
        return whole

    def _return(
        self,
        present: Sequence[_Owned],
        parts: Mapping[int, Tensor],
        whole: Mapping[int, tuple[_Owned, Tensor]],
        exchange: _Exchange,
    ) -> None:
        """Write the results into the parts of all processes."""
        send: list[list[Tensor]] = [[] for _ in self._ranks]
        for it, full in whole.values():
            for rank, block in it.matrix.blocks.items():
                if rank == self._me:
                    parts[id(it)].copy_(full[block])
                else:
                    send[rank].append(full[block])
        elsewhere = [it for it in present if it.owner != self._me and self._has_part(it)]
        sizes: list[list[int]] = [[] for _ in self._ranks]
        for it in elsewhere:
            sizes[it.owner].append(parts[id(it)].numel())
        received = exchange(send, sizes)
        for it in elsewhere:
            part = parts[id(it)]
            part.copy_(next(received[it.owner]).view(part.shape))

    def _exchange(
        self, empty: Tensor, send: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]]
    ) -> list[Iterator[Tensor]]:
        """Send tensors to all processes, and return for each of these what came from it.

        Args:
            empty: of the number format of all tensors, on the device that computes.
            send: to each process.
            sizes: numbers of the tensors that come from each process.
        """
        assert self._group is not None
        flat = torch.cat([empty, *(it.reshape(-1).to(empty.device) for to_one in send for it in to_one)])
        sent, expected = [sum(it.numel() for it in to_one) for to_one in send], [sum(of_one) for of_one in sizes]
        name = self._group.group_name
        received = operators.wait_tensor(operators.all_to_all_single(flat, expected, sent, name))
        return [iter(part.split(list(of_one))) for part, of_one in zip(received.split(expected), sizes, strict=True)]

    def _keep(
        self, empty: Tensor, send: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]]
    ) -> list[Iterator[Tensor]]:
        """Do as `_exchange` does if nothing travels."""
        return [iter(()) for _ in self._ranks]

    def _has_part(self, owned: _Owned) -> bool:
        return self._me in owned.matrix.blocks

    def _matrices(self, local: Tensor, full: Tensor) -> Iterator[Matrix]:
        layout = (full.shape, full.device_mesh, full.placements) if isinstance(full, DTensor) else (full.shape,)
        if layout not in self._layouts:
            self._layouts[layout] = _blocks_of([self._ranges(full, rank) for rank in self._ranks])
        *stack, _, _ = self._ranges(full, self._ranks[self._me])
        for index, blocks in self._layouts[layout].items():
            place = tuple(at - own.start for at, own in zip(index, stack, strict=True))
            yield Matrix(local, place, self.shape(local), blocks)

    def _ranges(self, full: Tensor, rank: int) -> tuple[slice, ...]:
        """Return the block of a parameter that a process has."""
        if not isinstance(full, DTensor) or self._mesh is None:
            return tuple(slice(0, size) for size in full.shape)
        part = full.device_mesh
        return ranges_at(full.shape, part, full.placements, place_on(part, self._mesh, rank))


def _blocks_of(ranges: Iterable[Sequence[slice]]) -> dict[tuple[int, ...], dict[int, Block]]:
    """Return, for each matrix of a stack, the blocks of all processes that have one.

    Args:
        ranges: of each process, in the dimensions of the stack.
    """
    found: dict[tuple[int, ...], dict[int, Block]] = defaultdict(dict)
    for rank, (*stack, rows, columns) in enumerate(ranges):
        if _size((rows, columns)):
            for index in product(*(range(own.start, own.stop) for own in stack)):
                found[index][rank] = rows, columns
    return dict(sorted(found.items()))


def _size(block: Block) -> int:
    rows, columns = block
    return (rows.stop - rows.start) * (columns.stop - columns.start)


def _with_owners(matrices: Iterable[Matrix], num_ranks: int) -> Iterator[_Owned]:
    """Give each matrix an owner, so that all have the same work; the largest ones come first.

    A matrix that lies whole on some processes stays on one of them.
    """
    load = [0] * num_ranks
    for matrix in sorted(matrices, key=lambda it: cost_of(it.shape), reverse=True):
        size = math.prod(matrix.shape)
        holders = [rank for rank, block in matrix.blocks.items() if _size(block) == size]
        owner = min(holders or range(num_ranks), key=load.__getitem__)
        load[owner] += cost_of(matrix.shape)
        yield _Owned(matrix, owner, _sources(matrix.blocks, owner))


def cost_of(shape: tuple[int, int]) -> int:
    """Return the work for a matrix, up to a factor."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


def _sources(blocks: Mapping[int, Block], owner: int) -> tuple[tuple[int, Block], ...]:
    """Return each block once, with the process that sends it: the owner, or else the first."""
    found: dict[tuple[int, int], tuple[int, Block]] = {}
    for rank in (owner, *blocks):
        if rank in blocks:
            rows, columns = blocks[rank]
            found.setdefault((rows.start, columns.start), (rank, blocks[rank]))
    return tuple(found.values())


def _travels(owned: _Owned) -> bool:
    return any(rank != owned.owner for rank in owned.matrix.blocks)


def _in_rounds(matrices: Iterable[_Owned]) -> Iterator[list[_Owned]]:
    """Divide matrices into exchanges, so that no process owns more than `ROUND` numbers in one."""
    held: dict[int, int] = defaultdict(int)
    one: list[_Owned] = []
    for it in matrices:
        size = math.prod(it.matrix.shape)
        if held[it.owner] and held[it.owner] + size > ROUND:
            yield one
            one, held = [], defaultdict(int)
        held[it.owner] += size
        one.append(it)
    if one:
        yield one


def _change(whole: Mapping[int, tuple[_Owned, Tensor]], function: Callable[[Tensor], Tensor]) -> None:
    """Replace full matrices in place; those of one shape are computed together."""
    by_shape: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
    for it, full in whole.values():
        by_shape[it.matrix.shape].append(full)
    for same in by_shape.values():
        for full, result in zip(same, function(torch.stack(same)), strict=True):
            full.copy_(result)
