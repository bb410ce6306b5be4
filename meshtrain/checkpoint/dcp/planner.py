"""Plan which block of each tensor a process writes or reads in DCP.

DCP's own planners ask DTensor. For some uneven sizes under FSDP2 over tensor parallelism, DTensor's
arithmetic is wrong by some rows (see `meshtrain.models.layout`). For example, GPT-2's vocabulary
over dp_shard = 4 x tp = 2 is saved without an error and cannot be loaded again. The planners here
use `local_ranges`. A tensor has one key, whatever its mesh.
"""

from dataclasses import dataclass

from torch import Size, Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from meshtrain.models.layout import local_ranges, local_tensor


@dataclass(frozen=True)
class Block:
    """The part of a tensor that this process holds.

    Attributes:
        shape: of the full tensor.
        offsets: where the part begins in the full tensor, per dimension.
        data: the part.
    """

    shape: Size
    offsets: Size
    data: Tensor


def block_of(tensor: Tensor) -> Block:
    """Return the part of a plain tensor or DTensor that this process holds, sharing its memory."""
    ranges, data = local_ranges(tensor), local_tensor(tensor).detach()
    sizes = Size(part.stop - part.start for part in ranges)
    assert sizes == data.shape, f"{tuple(sizes)} is not {tuple(data.shape)}"
    return Block(tensor.shape, Size(part.start for part in ranges), data)


class BlockSavePlanner(DefaultSavePlanner):
    """Planner that writes key -> Block. Equal blocks are written by one process only."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """List the blocks to write.

        Empty blocks are left out, because their offset may be that of another process's block.
        """
        items = [_write_item(key, block) for key, block in self.state_dict.items() if block.data.numel()]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the data of a write item."""
        return self.state_dict[index.fqn].data


class BlockLoadPlanner(DefaultLoadPlanner):
    """Planner that reads this process's block of every tensor, whatever blocks were saved."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> LoadPlan:
        """List the pieces of saved blocks that this process needs; all keys must be saved."""
        assert self.metadata is not None
        items = []
        for key, tensor in self.state_dict.items():
            block = block_of(tensor)
            if block.data.numel():
                saved = self.metadata.state_dict_metadata[key]
                items += create_read_items_for_chunk_list(key, saved, [_chunk(block)])  # type: ignore[arg-type]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the block that a read item fills."""
        return local_tensor(self.state_dict[index.fqn])


def _chunk(block: Block) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=block.offsets, sizes=block.data.shape)


def _write_item(key: str, block: Block) -> WriteItem:
    properties = TensorProperties.create_from_tensor(block.data)
    data = TensorWriteData(chunk=_chunk(block), properties=properties, size=block.shape)
    return WriteItem(MetadataIndex(key, block.offsets), WriteItemType.SHARD, tensor_data=data)
