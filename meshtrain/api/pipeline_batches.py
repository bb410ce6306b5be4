"""Batches of a pipeline: errors are raised on all ranks alike, before a stage computes.

A rank that raised alone would leave the others waiting for its messages.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from meshtrain.api.batches import compare_batches, different_batch, mask_without_cache
from meshtrain.api.parts import check_parts
from meshtrain.config.data import IGNORE_INDEX
from meshtrain.config.mesh import DATA_AXES
from meshtrain.errors import DataError, Problem
from meshtrain.models.dtypes import dtype_name
from meshtrain.parallel.check.batch import BatchShape
from meshtrain.parallel.check.pipeline import check_microbatches
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.tokens import check_tokens
from meshtrain.runtime.agreement import gather_objects
from meshtrain.runtime.mesh import all_reduce_over, axis_size
from meshtrain.training.loss import count_trained_tokens

TOKENS = (torch.int64, torch.int32)
IMPLIED_OPTIONS = {"use_cache": False, "output_attentions": False, "output_hidden_states": False, "return_dict": True}
"""Options that a program may pass to a training pass because they hold anyway."""
ALTERNATIVES = {
    "inputs_embeds": "only the first stage could use them; pass input_ids",
    "shift_labels": "a pipeline takes only labels; pass those that the model itself takes",
    "num_items_in_batch": "the loss is the mean over the trained tokens of all data ranks anyway; leave it out",
}
MOST_OFFSET = 2
"""OPT and BART keep up to this many rows before those of their positions."""


@dataclass(frozen=True)
class CheckedBatch:
    """A batch that has passed all checks.

    Attributes:
        inputs: for the stages, on their device; each of `labels` is that of the next token.
        num_tokens: () int64, number of labels that count on all data ranks.
        trains: whether any parameter of the model is not frozen.
    """

    inputs: dict[str, Tensor]
    num_tokens: Tensor
    trains: bool


class BatchChecker:
    """Checks and prepares the batches of one model.

    Args:
        pipeline: computes them.
        device: of this rank's stages.
        shifts_labels: whether the loss of the model's class shifts labels.
    """

    def __init__(self, pipeline: Pipeline, device: torch.device, *, shifts_labels: bool) -> None:
        self._pipeline, self._device, self._shifts_labels = pipeline, device, shifts_labels
        self._num_positions = _learned_positions(pipeline)
        names = inspect.signature(type(pipeline.stages[0].model).forward).parameters
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in names.values())
        self._known = None if takes_any else {*names, "labels"}

    def take(self, batch: Mapping[str, Any]) -> CheckedBatch:
        """Check a batch and prepare it. Collective over all ranks.

        It takes one message over tp and pp to compare, and one over the data axes to count.

        Raises:
            DataError: on all ranks alike, if the batch is wrong on one.
        """
        inputs: dict[str, Tensor] = {}
        problems: tuple[Problem, ...] = ()
        try:
            inputs = _tensors_of(batch)
            self._check(inputs)
            mask = mask_without_cache(self._pipeline.stages[0].model.config, batch)
            inputs |= {} if mask is None else {"attention_mask": mask}
        except DataError as error:
            problems = error.problems
        trains_here = any(True for _ in self._pipeline.trainable_parameters())
        ties = self._pipeline.tied_copies
        is_same, (is_wrong, trains, *trained_ties) = compare_batches(
            self._pipeline, inputs, bool(problems), trains_here, *ties.trained_originals()
        )
        ties.freeze_copies(trained_ties)
        labels = torch.empty(0) if problems else self._labels_of_next_tokens(inputs["labels"])
        counted = count_trained_tokens(labels.cpu())
        message = torch.stack([counted, torch.tensor(int(is_wrong or not is_same))])
        num_tokens, num_wrong = all_reduce_over(message, self._pipeline.mesh, DATA_AXES)
        if num_wrong:
            _raise_first(problems, None if is_same else different_batch(inputs))
        inputs |= {"input_ids": inputs["input_ids"].long(), "labels": labels}
        # torch's stages expect the strides of a contiguous tensor, which a slice of columns does
        # not have.
        on_device = {name: value.to(self._device).contiguous() for name, value in inputs.items()}
        return CheckedBatch(on_device, num_tokens.to(self._device), bool(trains))

    def _labels_of_next_tokens(self, labels: Tensor) -> Tensor:
        """Return labels (rows, seq) shifted as the loss of the class does."""
        if not self._shifts_labels:
            return labels.long()
        return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORE_INDEX)], dim=1).long()

    def _check(self, inputs: Mapping[str, Tensor]) -> None:
        if unknown := [name for name in inputs if self._known is not None and name not in self._known]:
            kind = type(self._pipeline.stages[0].model).__name__
            raise DataError(f"{unknown[0]} is not an input of {kind}", "leave it out of the batch")
        for name in ("input_ids", "labels"):
            _check_tokens_are_rows(name, inputs[name])
        self._check_shapes(inputs)
        self._check_schedule(inputs)
        check_tokens(self._pipeline, inputs["input_ids"])
        check_tokens(self._pipeline, inputs["labels"][inputs["labels"] != IGNORE_INDEX], what="labels")
        self._check_positions(inputs)

    def _check_shapes(self, inputs: Mapping[str, Tensor]) -> None:
        rows, width = shape = tuple(inputs["input_ids"].shape)
        if other := [name for name, value in inputs.items() if value.shape[:1] != (rows,)]:
            raise DataError(
                f"{other[0]} has the shape {tuple(inputs[other[0]].shape)}, input_ids {shape}: every tensor of a "
                "batch is cut into microbatches along its first dimension",
                "pass the same number of rows in all",
            )
        if inputs["labels"].shape != shape:
            raise DataError(
                f"labels has the shape {tuple(inputs['labels'].shape)}, input_ids {shape}",
                "pass a label for every token, -100 for one that must not count",
            )
        if other := [name for name, value in inputs.items() if value.dim() > 1 and value.shape[-1] != width]:
            raise DataError(
                f"{other[0]} has the shape {tuple(inputs[other[0]].shape)}, input_ids {shape}: its last dimension "
                f"must be the {width} tokens of a row",
                "pass as many",
            )

    def _check_schedule(self, inputs: Mapping[str, Tensor]) -> None:
        (rows, width), plan, micro = inputs["input_ids"].shape, self._pipeline.plan, self._pipeline.micro_batch_size
        if rows % micro:
            raise DataError(f"a batch of {rows} rows cannot be cut into microbatches of {micro}", "change one of them")
        if not rows * width:
            raise DataError(
                f"input_ids has the shape {(rows, width)}, so there is nothing to compute", "leave out such batches"
            )
        if plan.tensor.sequence_parallel and width % plan.mesh.tp:
            raise DataError(
                f"tensor.sequence_parallel splits the {width} tokens of a row over tp = {plan.mesh.tp}, which does "
                "not divide them",
                "pad with pad_to_multiple_of, or set sequence_parallel = false",
            )
        if plan.mesh.cp > 1:
            check_parts(plan, {name: value for name, value in inputs.items() if name != "labels"})
        shape = BatchShape(rows * axis_size(self._pipeline.mesh, *DATA_AXES), micro, width)
        if problems := list(check_microbatches(plan, shape)):
            raise DataError(problems)

    def _check_positions(self, inputs: Mapping[str, Tensor]) -> None:
        if self._num_positions is None:
            return
        ids, given = inputs["input_ids"], inputs.get("position_ids")
        low, high = (0, ids.shape[1] - 1) if given is None else (int(bound) for bound in given.aminmax())
        if low < 0 or high >= self._num_positions:
            what = f"rows of {ids.shape[1]} tokens" if given is None else f"position_ids from {low} to {high}"
            raise DataError(
                f"{what}, but the model has learned positions 0 to {self._num_positions - 1}",
                "pass shorter rows (truncation=True, max_length=... of the tokenizer)",
            )


def _learned_positions(pipeline: Pipeline) -> int | None:
    """Return the number of positions that the first stage has a table for.

    None on other stages, and where positions are computed.
    """
    if not pipeline.has_first_stage:
        return None
    model: Any = pipeline.stages[0].model
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int):
        return None
    tokens = model.get_input_embeddings()
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding) and module is not tokens)
    is_learned = any(0 <= table.num_embeddings - positions <= MOST_OFFSET for table in tables)
    return positions if is_learned else None


def _tensors_of(batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch, without options that have no effect."""
    if not isinstance(batch, Mapping):
        raise DataError(
            f"the batch is a {type(batch).__name__}",
            'pass a mapping with input_ids and labels, as a tokenizer returns it with return_tensors="pt"',
        )
    given = {
        name: value for name, value in batch.items() if value is not None and value is not IMPLIED_OPTIONS.get(name)
    }
    if missing := [name for name in ("input_ids", "labels") if name not in given]:
        raise DataError(
            f"the batch has no {missing[0]}, it has {', '.join(map(str, given)) or 'nothing'}",
            "pass input_ids and labels: the ranks of a pipeline compute the loss themselves",
        )
    for name, value in given.items():
        if name in ALTERNATIVES:
            raise DataError(f"{name} is in the batch: {ALTERNATIVES[name]}")
        if not isinstance(value, Tensor):
            raise DataError(
                f"{name} in the batch is a {type(value).__name__}, and a pipeline cuts tensors into microbatches",
                "pass a tensor with as many rows as input_ids, or leave it out",
            )
    return given


def _check_tokens_are_rows(name: str, ids: Tensor) -> None:
    if ids.dim() != 2 or ids.dtype not in TOKENS:
        raise DataError(f"{name} is {tuple(ids.shape)} {dtype_name(ids.dtype)}", "pass token ids (rows, seq), int64")


def _raise_first(problems: tuple[Problem, ...], other: Problem | None) -> NoReturn:
    """Raise the problem of the first rank that has found one. Collective over all ranks.

    A rank whose batch is intact only knows that another rank of its model has a different one.
    """
    answers = gather_objects((problems, () if other is None else (other,)))
    own = [found for found, _ in answers]
    if len(set(own)) == 1 and own[0]:
        raise DataError(own[0])
    for rank, found in enumerate(own):
        if found:
            raise DataError([f"rank {rank}: {problem}" for problem in found])
    raise DataError(next(others for _, others in answers if others))
