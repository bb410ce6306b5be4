"""The loss of a run on judged answers: a mean over the pairs or answers of a global batch."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshtrain.config.data import IGNORE_INDEX
from meshtrain.config.mesh import DATA_AXES
from meshtrain.config.preference import PreferenceConfig
from meshtrain.data.samples.referenced import REFERENCE
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.mesh import all_reduce_over
from meshtrain.training.loss import Batch, MeanLoss, MeanWithTerms, TokenLoss
from meshtrain.training.preference.formulas import PAIR_TERMS, dpo
from meshtrain.training.preference.rows import RowLogProbs, evaluated_rows, model_inputs


@dataclass(frozen=True)
class PreferenceLoss(TokenLoss):
    """A loss of whole answers, each in a row of its own.

    The answers of a sample are rows of one microbatch. A loss is not a sum over tokens, so each
    process of a cp group computes it from the sums over full rows.

    Attributes:
        config: of the run.
        rows: sums over rows.
        context_size: number of processes that have a part of each row.
    """

    config: PreferenceConfig
    rows: RowLogProbs
    context_size: int

    @property
    def evaluated_terms(self) -> tuple[str, ...]:
        """Return the metrics for the terms of an evaluation, which are those of a step."""
        return self.term_names

    def begin_step(self, pipeline: Pipeline, batch: Batch, counted: Tensor, scale: float) -> tuple[Batch, MeanLoss]:
        """Return the rows of a batch, and the loss function of the step. Collective.

        The arguments are those of `TokenLoss`.
        """
        counts = all_reduce_over(self.counts(batch), pipeline.mesh, DATA_AXES)
        answers = self.answers(pipeline, batch)
        return model_inputs(batch), MeanWithTerms(answers, counts[0].clamp(min=1), scale, counts[1:])

    def evaluate(self, pipeline: Pipeline, batch: Batch) -> Tensor:
        """Return sums over a batch, as `TokenLoss`. Collective."""
        answers = self.answers(pipeline, batch)
        loss = pipeline.evaluate(model_inputs(batch), answers)
        return torch.cat([loss.view(1), answers.sums, self.counts(batch)])

    def both_rows(self, pipeline: Pipeline, batch: Batch) -> Tensor:
        """Return (samples, 2) float64 log-probabilities, as a reference needs them. Collective.

        They are computed without gradients, and are zeros on a process without the last stage.

        Args:
            pipeline: of the run.
            batch: of this process.
        """
        return evaluated_rows(pipeline, self.rows, batch).view(-1, 2)

    def is_counted(self, batch: Batch) -> Tensor:
        """Return (samples,) whether a sample of a batch is one, and not a filler."""
        has_label = (batch["labels"] != IGNORE_INDEX).any(1)
        return has_label.view(-1, self.config.rows).all(1)

    def counts(self, batch: Batch) -> Tensor:
        """Return (1 + terms,) float64: how many samples the loss and each term are means over."""
        return self.is_counted(batch).sum().double().expand(1 + len(self.term_names)).clone()

    def answers(self, pipeline: Pipeline, batch: Batch) -> "Answers":
        """Return the loss function of the microbatches of a batch, which come in order."""
        return Answers(self, self.values(pipeline, batch), batch["labels"].device)

    @abstractmethod
    def values(self, pipeline: Pipeline, batch: Batch) -> tuple[Tensor, ...]:
        """Return what the loss of a sample needs besides its rows, (samples, ...) each. Collective.

        Args:
            pipeline: of the run.
            batch: of this process.
        """

    @abstractmethod
    def compute(self, log_probs: Tensor, lengths: Tensor, *values: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return (samples,) losses, and the (samples,) values of each term, 0 where it has none.

        Args:
            log_probs: (samples, rows) in nats.
            lengths: (samples, rows) number of tokens of the answer of each row.
            values: as `values` returns them, of these samples.
        """


class Answers:
    """The loss of a microbatch, summed over its samples.

    Args:
        loss: of the run.
        values: as of `PreferenceLoss.values`, for all microbatches.
        device: of the batch.

    Attributes:
        sums: (terms,) float64, over the microbatches so far: this process's share.
    """

    def __init__(self, loss: PreferenceLoss, values: Sequence[Tensor], device: torch.device) -> None:
        self._loss, self._values = loss, values
        self._next = 0
        self.sums = torch.zeros(len(loss.term_names), dtype=torch.float64, device=device)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the () sum; the arguments are those of `TokenLoss`.

        Every process of a cp group returns an equal share of it, with the gradient of its part of
        the rows.
        """
        loss = self._loss
        log_probs, lengths = (it.view(-1, loss.config.rows) for it in loss.rows(logits, labels))
        # torch's schedules pass no number of the microbatch. They compute losses in order.
        mine = slice(self._next, self._next + len(log_probs))
        self._next = mine.stop
        is_counted = (lengths > 0).all(1)
        # Any value will do for a filler whose logarithms and gradients are finite.
        log_probs = torch.where(is_counted.unsqueeze(1), log_probs, -1.0)
        losses, terms = loss.compute(log_probs, lengths.clamp(min=1), *(it[mine] for it in self._values))
        self.sums += torch.stack([it.detach().double().masked_fill(~is_counted, 0.0).sum() for it in terms]).div_(
            loss.context_size
        )
        total = losses.masked_fill(~is_counted, 0.0).sum()
        return total - total.detach() * (1.0 - 1.0 / loss.context_size)


@dataclass(frozen=True)
class DpoLoss(PreferenceLoss):
    """The sigmoid loss of pairs against a reference."""

    @property
    def term_names(self) -> tuple[str, ...]:
        """Return the metrics for the rewards."""
        return PAIR_TERMS

    def values(self, pipeline: Pipeline, batch: Batch) -> tuple[Tensor, ...]:
        """Return the log-probabilities by the reference."""
        return (batch[REFERENCE],)

    def compute(self, log_probs: Tensor, lengths: Tensor, *values: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return losses and rewards of pairs; see `PreferenceLoss`."""
        (reference,) = values
        beta, smoothing = self.config.beta, self.config.label_smoothing
        return dpo(log_probs, reference.to(log_probs), beta=beta, label_smoothing=smoothing)
