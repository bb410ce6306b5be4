"""The forward passes of a teacher, which give the logits of the microbatches of a step."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshtrain.parallel.head.apart import HeadApart
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.training.loss import Batch


@dataclass(frozen=True)
class BuiltTeacher:
    """A teacher on the mesh of its run.

    Attributes:
        pipeline: its stages, on the processes of those of the model, in evaluation mode.
        head: of its last stage, if it runs later than the rest; None elsewhere.
    """

    pipeline: Pipeline
    head: HeadApart | None = None

    def logits(self, batch: Batch) -> Iterator[Tensor]:
        """Return the logits of each microbatch, in order, without gradients or dropout. Collective.

        In one piece, each microbatch is computed when its logits are taken. With a pipeline, all go
        through the stages before this returns. Then what the head needs is kept, and only its
        logits are made when they are taken.

        Args:
            batch: `input_ids`, `labels` and further inputs, (local_batch, seq) each.

        Returns:
            (batch, seq, vocab) or this process's (batch, seq, vocab/tp) each; none on a process
            without the last stage.
        """
        if self.pipeline.num_stages == 1:
            size = self.pipeline.micro_batch_size
            firsts = range(0, len(batch["labels"]), size)
            parts = ({name: it[first : first + size] for name, it in batch.items()} for first in firsts)
            return (logits for part in parts for logits in self._results(part))
        kept = deque(self._results(batch))
        return (self._made_of(kept.popleft(), is_last=not kept) for _ in range(len(kept)))

    def _results(self, batch: Batch) -> list[Any]:
        """Return what is kept of each microbatch: logits, or what the head makes them of."""
        found: list[Any] = []

        def keep(logits: Tensor, labels: Tensor) -> Tensor:
            found.append(logits if self.head is None else self.head.take())
            return logits.new_zeros(())

        self.pipeline.evaluate(batch, keep)
        return found

    def _made_of(self, kept: Any, *, is_last: bool) -> Tensor:
        return kept if self.head is None else self.head.logits(kept, is_last=is_last)
