"""Calls of a model whose processes compute parts of the sequences (context parallel)."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from meshtrain.compat.transformers import has_loss_of_program, loss_replaced
from meshtrain.config.plan import ParallelPlan
from meshtrain.errors import DataError, ModelError
from meshtrain.models.build import stock_class
from meshtrain.parallel.check.context import length_unit, what_divides
from meshtrain.parallel.context.loss import LossOfParts
from meshtrain.parallel.context.parts import OF_TOKENS, ContextParallel

OF_SEQUENCES = ("attention_mask", "position_ids")
LABELS = ("labels", "shift_labels", "num_items_in_batch")
OPTIONS = {
    "logits_to_keep": (0, "the tokens whose logits are asked for may be those of other processes"),
    "return_dict": (True, "what the parts return is joined in the fields of the output, and a tuple has none"),
    "past_key_values": (None, "a process has the keys of its own part only, so there is no cache"),
    "output_attentions": (False, "a process has the attention of its own heads or tokens only"),
}
"""Option -> the only value that a call may pass besides None, and why."""
OF_CONFIG = ("return_dict", "output_attentions")
"""The options whose default is in the configuration of the model."""


class PartsOfCalls:
    """Makes calls of a model compute parts of sequences, and return what one process returns.

    The base model gets its part by itself (`StageAttention`), and so the head computes the logits
    of a part. The loss is summed over the parts, and what else a call returns is joined.

    Args:
        model: without a pipeline.
        plan: of the model.
        context: the parts of this process.
        is_chunked: whether the head takes its loss in chunks.
    """

    def __init__(
        self, model: PreTrainedModel, plan: ParallelPlan, context: ContextParallel, *, is_chunked: bool
    ) -> None:
        self._model, self._plan, self._context, self._is_chunked = model, plan, context, is_chunked
        self._call = ExitStack()
        self._loss: LossOfParts | None = None

    def begin(self, given: Mapping[str, Any], shifts: Callable[[Tensor], bool]) -> None:
        """Check a call and let the class compute its loss from parts.

        Args:
            given: arguments of the call, by name.
            shifts: whether the loss leaves out the first label of each row.

        Raises:
            DataError: for inputs of another shape, or a length that cannot be divided.
            ModelError: for an option that needs full sequences, or a loss of the program.
        """
        for name, (only, reason) in OPTIONS.items():
            asked = given.get(name)
            asked = getattr(self._model.config, name, None) if asked is None and name in OF_CONFIG else asked
            if asked is not None and (isinstance(asked, Tensor) or asked != only):
                shown = "" if isinstance(only, type(None)) else f" = {asked}"
                raise ModelError(f"{name}{shown} over cp: {reason}", "leave it out, or use a mesh with cp = 1")
        check_parts(self._plan, {name: value for name, value in given.items() if name not in LABELS})
        labels = given.get("labels")
        if labels is None:
            return
        if has_loss_of_program(self._model):
            raise ModelError(
                "model.loss_function was set by the program, but over cp it would get the logits of a part of each "
                "sequence",
                "compute it from the logits that a call returns, or use a mesh with cp = 1",
            )
        if not self._is_chunked:
            self._loss = LossOfParts(self._context, shifts=shifts(labels))
            self._call.enter_context(loss_replaced(self._model, self._loss))

    def join(self, output: Any) -> None:
        """Join the logits and hidden states in the output of a call, in place.

        Raises:
            ModelError: if the class has computed its loss from the logits of a part.
        """
        is_own = self._loss is not None and not self._loss.is_called
        self.end()
        if is_own:
            raise ModelError(
                f"{stock_class(self._model).__name__} computes its loss itself, not by the loss function of "
                "transformers, and over cp from the logits of a part",
                "pass no labels and compute it from the logits that the call returns, or use a mesh with cp = 1",
            )
        assert isinstance(output, ModelOutput), "the call is checked"
        for name, value in output.items():
            if name == "logits":
                output[name] = self._context.shared(value)
            elif name.endswith("hidden_states") and isinstance(value, tuple):
                output[name] = tuple(map(self._context.shared, value))

    def end(self) -> None:
        """Let the class compute its own loss again."""
        self._loss = None
        self._call.close()


def check_parts(plan: ParallelPlan, inputs: Mapping[str, Any]) -> None:
    """Check that the inputs of a model, without labels, can be divided over cp.

    Raises:
        DataError: if not.
    """
    tokens = inputs.get("inputs_embeds") if inputs.get("input_ids") is None else inputs["input_ids"]
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        raise DataError("there are no input_ids (rows, seq) to divide over cp", "pass them")
    for name, value in inputs.items():
        is_known = name in (*OF_TOKENS, *OF_SEQUENCES)
        if isinstance(value, Tensor) and not is_known:
            raise DataError(
                f"{name} cannot be divided over cp, which takes {', '.join((*OF_TOKENS, *OF_SEQUENCES))}",
                "leave it out, or use a mesh with cp = 1",
            )
        if is_known and value is not None and name != "inputs_embeds":
            _check_shape(name, value, tokens)
    unit = length_unit(plan)
    if tokens.shape[1] % unit:
        raise DataError(
            f"{what_divides(plan)} divides each sequence into {unit} equal parts, which is not possible for "
            f"{tokens.shape[1]} tokens",
            f"pad the batch (pad_to_multiple_of = {unit} of a tokenizer)",
        )


def _check_shape(name: str, value: Any, tokens: Tensor) -> None:
    rows, length = tokens.shape[:2]
    rows_of = (1, rows) if name == "position_ids" else (rows,)
    if not isinstance(value, Tensor) or value.dim() != 2 or value.shape[1] != length or value.shape[0] not in rows_of:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise DataError(
            f"{name} is {found}, but cp divides sequences of {(rows, length)} tokens", "pass one number for each token"
        )
