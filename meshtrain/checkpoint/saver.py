"""Save checkpoints while training waits, or while it goes on."""

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
from meshtrain.checkpoint.storage.location import Location
from meshtrain.checkpoint.storage.publishing import Retention
from meshtrain.runtime.hang import SAVING_THREAD


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was published.

    Attributes:
        step: optimizer steps done.
        directory: where it lies.
        seconds: from the first byte to the published directory.
    """

    step: int
    directory: Location
    seconds: float


class Saver:
    """Writes one checkpoint at a time. Made by all ranks together.

    In the background, the state is copied to host memory and training goes on while a thread writes the copy. The
    copy's memory is kept for the next save.

    Args:
        root: where checkpoints lie.
        retention: which of them stay.
        in_background: whether training goes on meanwhile.
    """

    def __init__(self, root: Location, retention: Retention, *, in_background: bool) -> None:
        self._root, self._retention, self._in_background = root, retention, in_background
        # A group of its own: with the training's, the collectives of the two threads would answer each other.
        self._group = dist.new_group(backend="gloo")
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._published: SimpleQueue[Saved] = SimpleQueue()

    @property
    def has_failed(self) -> bool:
        """Whether the save in the background could not be finished; `finish` raises why."""
        return self._error is not None

    def save(self, tensors: Mapping[str, Tensor], manifest: Manifest, huggingface: HuggingFace) -> None:
        """Begin to save; when this returns, `tensors` may change. Collective.

        Raises:
            CheckpointError: the same on all ranks: this save, or the one before it in the background, failed.
        """
        self.finish()
        blocks = {key: block_of(tensor) for key, tensor in tensors.items()}
        if not self._in_background:
            self._published.put(self._write(blocks, manifest, huggingface))
            return
        copies = self._copy(blocks)
        arguments = (copies, manifest, huggingface)
        # A daemon: a process that ends because of a bug does not wait for others to finish a save with it.
        self._thread = threading.Thread(
            target=self._write_noting_errors, args=arguments, name=SAVING_THREAD, daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait for the save in the background, if there is one. Collective.

        Raises:
            CheckpointError: the same on all ranks, if it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def num_published(self) -> int:
        """How many `published` would return here; other ranks may have heard of fewer."""
        return self._published.qsize()

    def published(self, at_most: int | None = None) -> list[Saved]:
        """Return the checkpoints that were published since the last call, oldest first.

        Args:
            at_most: so many, for the ranks to hear of them together; not needed after `finish`.
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
        """Copy what lies on this rank into host memory."""
        copies = {}
        for key, block in blocks.items():
            copy = self._copies.get(key)
            if copy is None:
                # Page-locked memory is what a GPU can write into while the CPU goes on.
                copy = torch.empty(
                    block.data.shape, dtype=block.data.dtype, device="cpu", pin_memory=block.data.is_cuda
                )
                self._copies[key] = copy
            copies[key] = replace(block, data=copy.copy_(block.data, non_blocking=True))
        if any(block.data.is_cuda for block in blocks.values()):
            torch.cuda.current_stream().synchronize()
        return copies
