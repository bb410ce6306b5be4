"""Write a Hugging Face folder from tensors that are sharded on a mesh, all processes together."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from meshtrain import console
from meshtrain.checkpoint.huggingface.adapters import Merging
from meshtrain.checkpoint.huggingface.layout import FilePlan, Group, HubLayout
from meshtrain.checkpoint.huggingface.stock_tensors import Shape, StockTensor
from meshtrain.checkpoint.huggingface.writer import FileWriter, copy_kept, find_lost_files, write_index
from meshtrain.checkpoint.storage.named_folder import (
    cannot_write,
    check_new,
    create_empty_folder,
    locked_together,
    publish_folder,
    remove_temporary,
    temporary_folder,
)
from meshtrain.errors import CheckpointError
from meshtrain.models.layout import holders_of, local_tensor
from meshtrain.runtime.agreement import failing_together, gather_objects, is_first_rank, raise_together
from meshtrain.runtime.process import LONGEST_COLLECTIVE


@dataclass(frozen=True)
class LiveTensors:
    """The tensors of a model on its mesh.

    Attributes:
        held: our name -> the part of the tensor that this process holds.
        stock: stock name -> how it is made of ours, for tensors that this process holds.
        shapes: stock name -> shape, of the full model.
        owners: stock name -> the rank that gathers it: the first process of a pipeline stage that
            holds it.
        groups: of all processes.
        merging: adapters that are added to the tensors of this process.
    """

    held: Mapping[str, Tensor]
    stock: Mapping[str, StockTensor]
    shapes: Mapping[str, Shape]
    owners: Mapping[str, int]
    groups: "Groups"
    merging: Merging


@dataclass(frozen=True)
class Groups:
    """Groups of all processes over gloo, whose timeout is long enough for a slow disk.

    They work in host memory, whatever backend the training uses.

    Attributes:
        messages: from one process to another. Collectives have their own group, so that the two are
            not counted together.
        agreement: for collectives.
    """

    messages: ProcessGroup
    agreement: ProcessGroup


@contextmanager
def groups_for_saving() -> Iterator[Groups]:
    """Create groups that exist while the block runs. Collective."""
    messages, agreement = (dist.new_group(backend="gloo", timeout=LONGEST_COLLECTIVE) for _ in range(2))
    try:
        yield Groups(messages, agreement)
    finally:
        dist.destroy_process_group(messages)
        dist.destroy_process_group(agreement)


def find_live_tensors(
    held: Mapping[str, Tensor],
    stock: Mapping[str, StockTensor],
    leader: int,
    groups: Groups,
    merging: Merging,
) -> LiveTensors:
    """Exchange names, shapes and owners of the tensors of all processes. Collective.

    Args:
        held: our name -> the part of the tensor that this process holds.
        stock: stock name -> how it is made of ours, for tensors that this process holds.
        leader: the rank that gathers the tensors of this process.
        groups: of all processes.
        merging: adapters of the tensors that this process holds.
    """
    mine = {name: tensor.shape for name, tensor in stock.items()} if leader == dist.get_rank() else {}
    shapes: dict[str, Shape] = {}
    owners: dict[str, int] = {}
    for rank, answer in enumerate(gather_objects(mine, groups.agreement)):
        for name, shape in answer.items():
            owners.setdefault(name, rank)
            shapes[name] = shape
    return LiveTensors(held, stock, shapes, owners, groups, merging)


def write_live_folder(
    folder: Path, layout: HubLayout, plan: FilePlan, live: LiveTensors, *, describe: Callable[[Path], None]
) -> None:
    """Write a folder. Collective.

    Args:
        folder: appears when it is complete. Every machine must see the same one.
        layout: of the files, made of the stock tensors of `live`.
        plan: of the files.
        describe: writes the files beside the weights. Called on the first process.

    Raises:
        CheckpointError: the same on all processes, if the folder is not empty or cannot be written.
    """
    agreement = live.groups.agreement
    with locked_together(folder, agreement):
        temporary = gather_objects(temporary_folder(folder), agreement)[0]
        try:
            _on_first_rank(partial(_begin, folder, temporary, describe), folder, agreement)
            problem = _Writing(temporary, layout, plan, live).run(folder)
            raise_together([problem] if problem else [], CheckpointError, agreement)
            _on_first_rank(partial(_finish, folder, temporary, layout, plan), folder, agreement)
        finally:
            if is_first_rank():
                remove_temporary(temporary)


def _begin(folder: Path, temporary: Path, describe: Callable[[Path], None]) -> None:
    check_new(folder)
    create_empty_folder(temporary)
    describe(temporary)


def _finish(folder: Path, temporary: Path, layout: HubLayout, plan: FilePlan) -> None:
    copy_kept(temporary, layout, plan)
    if lost := find_lost_files(temporary, layout, plan):
        raise CheckpointError(lost)
    write_index(temporary, layout, plan)
    publish_folder(temporary, folder)


def _on_first_rank(work: Callable[[], None], folder: Path, agreement: ProcessGroup) -> None:
    with failing_together(CheckpointError, agreement):
        if is_first_rank():
            try:
                work()
            except OSError as error:
                raise CheckpointError(cannot_write(folder, error)) from error


@contextmanager
def _unseen() -> Iterator[Callable[[int], None]]:
    yield lambda _: None


class _Writing:
    """One process's part in writing all groups of tensors.

    The owner of a group gathers it and converts it to the tensors of the files. The owner of a
    file's first tensor writes that file. Where a file holds tensors of several stages, their other
    owners send theirs to the writer. Every message waits for its receiver, so all processes handle
    the groups in the same order. Groups that stay with their owner come first; otherwise one stage
    would wait for all of the previous stage.
    """

    def __init__(self, temporary: Path, layout: HubLayout, plan: FilePlan, live: LiveTensors) -> None:
        self._layout, self._plan, self._live = layout, plan, live
        self._rank = dist.get_rank()
        self._files = FileWriter(temporary, layout, plan)
        owner_of = {name: self._owner(group) for group in layout.groups for name in group.hub}
        # The first rank writes files that only hold tensors of another folder, when all are done.
        self._writers = {
            file: next((owner_of[name] for name in names if name in owner_of), 0) for file, names in plan.files.items()
        }
        self._error: OSError | None = None

    def run(self, folder: Path) -> str | None:
        """Take part in writing until the end, and return what went wrong on this process.

        A process that cannot write continues to receive, because others would wait for it.
        """
        mine = [
            name
            for name, file in self._plan.file_of.items()
            if self._writers[file] == self._rank and name not in self._layout.kept
        ]
        total_bytes = sum(self._layout.tensors[name].nbytes for name in mine)
        # In a user's own script, every process might print.
        shown = console.progress("save", max(1, total_bytes), unit="MB") if is_first_rank() else _unseen()
        with shown as advance:
            for group in sorted(self._layout.groups, key=self._leaves_its_owner):
                self._take_part(group, advance)
            self._guard(self._files.close)
        return cannot_write(folder, self._error) if self._error is not None else None

    def _owner(self, group: Group) -> int:
        owner, *others = {self._live.owners[name] for name in group.stock}
        assert not others, f"{group.stock} belong together and lie on several stages"
        return owner

    def _writer(self, name: str) -> int:
        return self._writers[self._plan.file_of[name]]

    def _leaves_its_owner(self, group: Group) -> bool:
        return any(self._writer(name) != self._owner(group) for name in group.hub)

    def _take_part(self, group: Group, advance: Callable[[int], None]) -> None:
        owner = self._owner(group)
        full = {name: self._gather(name, owner) for name in group.stock if name in self._live.stock}
        made = {}
        if owner == self._rank:
            made = self._layout.convert({name: tensor for name, tensor in full.items() if tensor is not None})
        del full
        for name in group.hub:
            writer = self._writer(name)
            if writer == self._rank:
                tensor = made.pop(name) if owner == self._rank else self._receive(name, owner)
                self._guard(partial(self._files.write, name, tensor))
                advance(tensor.nbytes)
            elif owner == self._rank:
                _send(made.pop(name), writer, self._live.groups.messages)

    def _gather(self, name: str, owner: int) -> Tensor | None:
        tensor, dtype, merging = self._live.stock[name], self._layout.dtypes[name], self._live.merging
        adapters = merging.adapters.get(name)
        if adapters is None:
            return self._gather_one(tensor, dtype, owner)
        # Adapters are added before the weights are rounded to the number format of the files.
        full = self._gather_own(tensor, owner)
        for adapter in adapters:
            factors = [self._gather_own(merging.factors[factor], owner) for factor in adapter.factors]
            if full is not None:
                full = adapter.added_to(full, *(factor for factor in factors if factor is not None))
        return None if full is None else full.to(dtype)

    def _gather_own(self, tensor: StockTensor, owner: int) -> Tensor | None:
        return self._gather_one(tensor, self._live.held[tensor.parts[0]].dtype, owner)

    def _gather_one(self, tensor: StockTensor, dtype: torch.dtype, owner: int) -> Tensor | None:
        full = torch.empty(tensor.shape, dtype=dtype) if owner == self._rank else None
        views = tensor.views(full) if full is not None else {}
        for part in tensor.parts:
            _gather_block_by_block(
                self._live.held[part], views.get(part), dtype=dtype, leader=owner, group=self._live.groups.messages
            )
        return full

    def _receive(self, name: str, owner: int) -> Tensor:
        wanted = self._layout.tensors[name]
        tensor = torch.empty(wanted.shape, dtype=wanted.dtype)
        _receive(tensor, owner, self._live.groups.messages)
        return tensor

    def _guard(self, work: Callable[[], None]) -> None:
        if self._error is None:
            try:
                work()
            except OSError as error:
                self._error = error


@torch.no_grad()
def _gather_block_by_block(
    tensor: Tensor, full: Tensor | None, *, dtype: torch.dtype, leader: int, group: ProcessGroup
) -> None:
    """Fill `full` on the leader from the blocks of a tensor. All processes of its mesh call it.

    The blocks are sent in host memory, and only to the leader. A device may not have enough memory
    for the full tensor, and DTensor's own `full_tensor` returns it on all processes.

    Args:
        tensor: the block of this process, on any device.
        full: (shape of `tensor`) full tensor on the CPU, on the leader; None elsewhere.
        dtype: number format of `full`. Blocks are cast before they are sent.
        leader: the rank that gathers the tensor. Processes whose mesh does not contain it send
            nothing.
        group: all processes, over gloo.
    """
    rank = dist.get_rank()
    for holder, ranges in _holders(tensor, leader):
        if full is not None:
            block = full[tuple(ranges)]
            if holder == leader:
                block.copy_(local_tensor(tensor))
            else:
                _receive(block, holder, group)
        elif holder == rank:
            _send(local_tensor(tensor).to("cpu", dtype), leader, group)


def _send(tensor: Tensor, rank: int, group: ProcessGroup) -> None:
    """Send a tensor on the CPU."""
    dist.send(_bytes(tensor.contiguous()), rank, group)


def _receive(tensor: Tensor, rank: int, group: ProcessGroup) -> None:
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
