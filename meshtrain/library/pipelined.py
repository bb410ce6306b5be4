"""A parallel model with a pipeline: no rank holds all of it, so it is not called but given whole batches."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from meshtrain.data.samples import IGNORE_INDEX
from meshtrain.errors import DataError
from meshtrain.library.batches import check_same_batch
from meshtrain.library.gradients import add_gradients, set_gradients_aside
from meshtrain.library.handle import ATTRIBUTE, Handle
from meshtrain.library.streams import ProgramStreams
from meshtrain.parallel.check.batch import BatchShape
from meshtrain.parallel.check.pipeline import check_microbatches
from meshtrain.parallel.tokens import check_tokens
from meshtrain.runtime.mesh import DATA_AXES, all_reduce_over, axis_size, data_rank
from meshtrain.training.gradients import complete_gradients
from meshtrain.training.loss import TokenLoss, count_trained_tokens


class PipelinedModel:
    """The stages that this rank holds of a model, and how they train with those of the other ranks.

    Every call is collective: all ranks make it. Ranks that share a model (pp and tp) give the same batch; over the dp
    axes each gives its own part. `meshtrain.generate`, `save_pretrained`, `save_checkpoint` and `clip_grad_norm` take
    it as they take a model without a pipeline.

    Args:
        handle: of the model.
    """

    def __init__(self, handle: Handle) -> None:
        setattr(self, ATTRIBUTE, handle)
        self._handle = handle
        self._pipeline = handle.pipeline
        self._streams = ProgramStreams(handle)
        group = self._pipeline.mesh.get_group("tp") if self._pipeline.logits_are_sharded else None
        self._loss = TokenLoss(self.config.get_text_config().vocab_size, group)

    @property
    def config(self) -> PretrainedConfig:
        """The Hugging Face configuration of the whole model."""
        return self._pipeline.stages[0].model.config

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._handle.device

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self._pipeline.has_last_stage

    @property
    def data_rank(self) -> int:
        """Which part of every global batch this rank reads: 0 to `num_data_ranks`, excluded."""
        return data_rank(self._pipeline.mesh)

    @property
    def num_data_ranks(self) -> int:
        """In how many parts a global batch is read."""
        return axis_size(self._pipeline.mesh, *DATA_AXES)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what lies on this rank, under the names of the stock model; a fused projection in its parts."""
        return self._pipeline.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield what lies on this rank, for an optimizer; then call `meshtrain.rebind(optimizer)`.

        Give it all, frozen ones too, which it leaves alone: of those that train there may be none on a rank, and torch
        makes no optimizer of nothing.
        """
        return (parameter for _, parameter in self.named_parameters())

    def train(self, mode: bool = True) -> "PipelinedModel":
        """Switch dropout on or off, as `nn.Module.train` does."""
        for stage in self._pipeline.stages:
            stage.model.train(mode)
        return self

    def eval(self) -> "PipelinedModel":
        """Switch dropout off."""
        return self.train(mode=False)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters():
            parameter.grad = None

    def forward_backward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Run all microbatches of a batch forward and backward; afterwards every gradient is whole.

        As with `loss.backward()`, gradients are added to those that are there: call `optimizer.zero_grad()` before.

        Args:
            batch: `input_ids` (rows, seq), `labels` (rows, seq) as transformers takes them, unshifted and -100 where a
                token shall not count, and further inputs of the model, such as `attention_mask`. The rows are a
                multiple of the micro batch size, and enough for the schedule.

        Returns:
            () float64, the same on every rank: the mean loss over the trained tokens of all data ranks, in nats;
            without the auxiliary loss of routers, which trains nevertheless.

        Raises:
            ModelError: if the parameters have no values yet.
            DataError: if the batch does not fit the plan, or differs between ranks that share a model.
        """
        inputs = self._prepare(batch)
        earlier = set_gradients_aside(self._pipeline)
        self._streams.begin()
        local = self._pipeline.forward_backward(inputs, self._loss)
        self._streams.end()
        complete_gradients(self._pipeline)
        add_gradients(earlier)
        return self._summed(local)

    def evaluate(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss of a batch, without dropout and gradients; as `forward_backward` otherwise."""
        return self._summed(self._pipeline.evaluate(self._prepare(batch), self._loss))

    def _prepare(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._handle.check_values()
        missing = [name for name in ("input_ids", "labels") if name not in batch]
        if missing:
            raise DataError(
                f"the batch has no {missing[0]}, it has {', '.join(batch) or 'nothing'}; the ranks of a pipeline take "
                "input_ids and labels, and compute the loss themselves"
            )
        self._check_shape(batch)
        check_same_batch(self._pipeline, batch)
        check_tokens(self._pipeline, batch["input_ids"])
        check_tokens(self._pipeline, batch["labels"][batch["labels"] != IGNORE_INDEX], what="labels")
        inputs = {name: value.to(self.device) for name, value in batch.items()}
        # What a stock loss does: each token predicts the next.
        labels = inputs["labels"]
        inputs["labels"] = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORE_INDEX)], dim=1)
        counted = all_reduce_over(count_trained_tokens(inputs["labels"]), self._pipeline.mesh, DATA_AXES)
        self._loss.num_tokens = counted.clamp(min=1)
        return inputs

    def _check_shape(self, batch: Mapping[str, Tensor]) -> None:
        rows, width = batch["input_ids"].shape
        plan, micro = self._pipeline.plan, self._pipeline.micro_batch_size
        if other := [name for name, value in batch.items() if value.shape[:1] != (rows,)]:
            raise DataError(
                f"{other[0]} has the shape {tuple(batch[other[0]].shape)}, input_ids {(rows, width)}: every tensor of "
                "a batch is cut into microbatches along its first dimension; give all as many rows"
            )
        if batch["labels"].shape != batch["input_ids"].shape:
            raise DataError(
                f"labels has the shape {tuple(batch['labels'].shape)}, input_ids {(rows, width)}; give a label for "
                "every token, -100 where none shall count"
            )
        if rows % micro:
            raise DataError(f"a batch of {rows} rows cannot be cut into microbatches of {micro}; change one of them")
        if plan.tensor.sequence_parallel and width % plan.mesh.tp:
            raise DataError(
                f"tensor.sequence_parallel splits the {width} tokens of a row over tp = {plan.mesh.tp}, which does not "
                "divide them; pad with pad_to_multiple_of, or set sequence_parallel = false"
            )
        shape = BatchShape(rows * axis_size(self._pipeline.mesh, *DATA_AXES), micro, width)
        if problems := list(check_microbatches(plan, shape)):
            raise DataError(problems)

    def _summed(self, local: Tensor) -> Tensor:
        return all_reduce_over(local.detach().clone(), self._pipeline.mesh, ("pp", *DATA_AXES))
