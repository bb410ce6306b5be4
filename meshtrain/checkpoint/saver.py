"""Save checkpoints while training waits, or in the background while it continues."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from meshtrain.checkpoint.dcp.planner import Block, block_of
from meshtrain.checkpoint.dcp.store import HuggingFace, save_blocks
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.storage.publishing import Retention
from meshtrain.runtime.hang import SAVING_THREAD
from meshtrain.runtime.location import Location


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was published.

    Attributes:
        step: number of optimizer steps done.
        directory: where the checkpoint is stored.
        seconds: from the first byte to the published directory.
    """

    step: int
    directory: Location
    seconds: float


class Saver:
    """Writes one checkpoint at a time. All ranks create it together.

    For a save in the background, the state is copied to host memory. A thread writes the copy while
    training continues. The memory of the copy is kept for the next save.

    Args:
        root: directory of the checkpoints.
        retention: which checkpoints stay.
        in_background: whether training continues while a checkpoint is written.
    """

    def __init__(self, root: Location, retention: Retention, *, in_background: bool) -> None:
        self._root, self._retention, self._in_background = root, retention, in_background
        # The saver has its own group. In the group of the training, the collectives of the two
        # threads would answer each other.
        self._group = dist.new_group(backend="gloo")
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._published: SimpleQueue[Saved] = SimpleQueue()

    @property
    def has_failed(self) -> bool:
        """Return whether the save in the background failed. `finish` raises its error."""
        return self._error is not None

    def save(self, tensors: Mapping[str, Tensor], manifest: Manifest, huggingface: HuggingFace) -> None:
        """Begin to save. When this returns, `tensors` may change. Collective.

        Raises:
            CheckpointError: the same on all ranks, if this save or the previous one in the
                background failed.
        """
        self.finish()
        blocks = {key: block_of(tensor) for key, tensor in tensors.items()}
        if not self._in_background:
            self._published.put(self._write(blocks, manifest, huggingface))
            return
        copies = self._copy(blocks)
        arguments = (copies, manifest, huggingface)
        # The thread is a daemon, so that a process that ends because of a bug does not wait for
        # other processes to finish a save with it.
        self._thread = threading.Thread(
            target=self._write_noting_errors, args=arguments, name=SAVING_THREAD, daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait for the save in the background, if there is one. Collective.

        Raises:
            CheckpointError: the same on all ranks, if the save failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def num_published(self) -> int:
        """Return how many checkpoints `published` would return; other ranks may have fewer."""
        return self._published.qsize()

    def published(self, at_most: int | None = None) -> list[Saved]:
        """Return the checkpoints that were published since the last call, oldest first.

        Args:
            at_most: maximum number to return, so that all ranks can return the same ones. Not
                needed after `finish`.
        """
        number = self.num_published if at_most is None else min(at_most, self.num_published)
        return [self._published.get() for _ in range(number)]

    def _write(self, blocks: Mapping[str, Block], manifest: Manifest, huggingface: HuggingFace) -> Saved:
        begin = time.perf_counter()
        directory = save_blocks(
            self._root,
            blocks,
            manifest=manifest,
            huggingface=huggingface,
            retention=self._retention,
            group=self._group,
        )
        return Saved(manifest.step, directory, time.perf_counter() - begin)

    def _write_noting_errors(self, blocks: Mapping[str, Block], manifest: Manifest, huggingface: HuggingFace) -> None:
        try:
            saved = self._write(blocks, manifest, huggingface)
        except BaseException as error:  # noqa: BLE001 - `finish` raises it in the thread that trains, whatever it is
            self._error = error
        else:
            self._published.put(saved)

    def _copy(self, blocks: Mapping[str, Block]) -> dict[str, Block]:
        """Copy the blocks that this rank holds into host memory."""
        copies = {}
        for key, block in blocks.items():
            copy = self._copies.get(key)
            if copy is None:
                # A GPU writes into page-locked memory while the CPU continues.
                copy = torch.empty(
                    block.data.shape, dtype=block.data.dtype, device="cpu", pin_memory=block.data.is_cuda
                )
                self._copies[key] = copy
            copies[key] = replace(block, data=copy.copy_(block.data, non_blocking=True))
        if any(block.data.is_cuda for block in blocks.values()):
            torch.cuda.current_stream().synchronize()
        return copies
