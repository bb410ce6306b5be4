"""Log-probabilities of rows: sums over the tokens of answers."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshtrain.config.data import IGNORE_INDEX
from meshtrain.config.mesh import CP
from meshtrain.config.preference import PreferenceConfig
from meshtrain.data.samples.answers import DESIRABLE, MISMATCHED
from meshtrain.data.samples.referenced import REFERENCE
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.mesh import axis_size
from meshtrain.training.loss import TokenLoss

MODEL_INPUTS = ("input_ids", "labels", "attention_mask")


@dataclass(frozen=True)
class RowLogProbs:
    """Sums the log-probabilities of the labels of each row.

    Attributes:
        tokens: the cross-entropy of each token.
        context: the cp group, which has parts of each row; None without cp.
    """

    tokens: TokenLoss
    context: ProcessGroup | None

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (rows,) log-probabilities in nats, and the (rows,) number of labels.

        Both are those of full rows. The gradient is that of this process's part.

        Args:
            logits: of a microbatch, as the last stage returns them.
            labels: (rows, seq)
        """
        own = -self.tokens.of_tokens(logits, labels).sum(1)
        counts = (labels != IGNORE_INDEX).sum(1).to(own.dtype)
        if self.context is None:
            return own, counts
        sums = torch.stack([own.detach(), counts])
        dist.all_reduce(sums, group=self.context)
        return sums[0] + (own - own.detach()), sums[1]


def build_row_log_probs(pipeline: Pipeline, tokens: TokenLoss) -> RowLogProbs:
    """Return the sums over rows for a pipeline's last stage."""
    return RowLogProbs(tokens, pipeline.mesh.get_group(CP) if axis_size(pipeline.mesh, CP) > 1 else None)


class RowCollector:
    """A loss function that keeps the log-probabilities of the rows of all microbatches."""

    def __init__(self, rows: RowLogProbs) -> None:
        self._rows = rows
        self._found: list[Tensor] = []

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return () zero; the arguments are those of `RowLogProbs`."""
        log_probs, _ = self._rows(logits, labels)
        self._found.append(log_probs)
        return log_probs.new_zeros(())

    def found(self, num_rows: int, device: torch.device) -> Tensor:
        """Return (num_rows,) float64; zeros on a process without the last stage."""
        if not self._found:
            return torch.zeros(num_rows, dtype=torch.float64, device=device)
        return torch.cat(self._found).double()


def evaluated_rows(pipeline: Pipeline, rows: RowLogProbs, batch: Mapping[str, Tensor], prefix: str = "") -> Tensor:
    """Return the (rows,) float64 log-probabilities of a batch, in a pass without gradients.

    They are zeros on a process without the last stage. Collective.

    Args:
        pipeline: of the run.
        rows: of its last stage.
        batch: of this process.
        prefix: of the names of the rows in the batch.
    """
    collector = RowCollector(rows)
    inputs = model_inputs(batch, prefix)
    pipeline.evaluate(inputs, collector)
    return collector.found(inputs["labels"].shape[0], inputs["labels"].device)


def reference_like(config: PreferenceConfig, labels: Tensor) -> dict[str, Tensor]:
    """Return what the loss of a run takes of a batch besides the rows, for any batch of a shape.

    Args:
        config: of the run.
        labels: (rows, seq) of the batch.
    """
    if not config.has_reference:
        return {}
    found = {REFERENCE: labels.new_zeros((len(labels) // config.rows, 2), dtype=torch.float64)}
    if config.loss == "kto":
        found |= {f"{MISMATCHED}{name}": torch.ones_like(labels) for name in MODEL_INPUTS}
        found[DESIRABLE] = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    return found


def model_inputs(batch: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return what the model and the loss take of a batch.

    Args:
        batch: with the rows of answers.
        prefix: MISMATCHED: the mismatched rows.
    """
    assert prefix in ("", MISMATCHED)
    return {name: batch[f"{prefix}{name}"] for name in MODEL_INPUTS}
