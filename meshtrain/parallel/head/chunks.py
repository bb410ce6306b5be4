"""The pass of a model whose head and loss run in chunks of tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from meshtrain.compat.autograd import leaves_of
from meshtrain.compat.nn import mix_in, parameter_table
from meshtrain.compat.transformers import loss_replaced
from meshtrain.config.data import IGNORE_INDEX
from meshtrain.errors import ModelError
from meshtrain.parallel.context.parts import ContextParallel
from meshtrain.parallel.cut.probe import no_router_logits
from meshtrain.parallel.cut.stubs import Channel
from meshtrain.parallel.head.gradients import sum_over_chunks
from meshtrain.parallel.targets import next_tokens

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Maps the logits and the labels (batch, seq) of a microbatch to a () loss.

The losses of a step are summed.
"""


class ChunkedHead:
    """The head of one model, which runs in chunks in passes with labels.

    In other passes the model computes all logits as ever.

    Args:
        model: the stock model, or the last stage of it. It is changed in place.
        base: name of its base model.
        chunk_tokens: number of tokens of a chunk.
        channel: of the stage, which counts the calls of its parts.
        stock_loss: whether the loss of a pass is that of the class. Otherwise it is
            `loss_function`.
        context: what this process does with its part of the sequences, if a pass with the loss of
            the class gets full ones.

    Attributes:
        loss_function: of the present step.
    """

    loss_function: LossFunction

    def __init__(
        self,
        model: PreTrainedModel,
        base: str,
        chunk_tokens: int,
        channel: Channel,
        *,
        stock_loss: bool,
        context: ContextParallel | None = None,
    ) -> None:
        self._model, self._chunk_tokens, self._channel, self._context = model, chunk_tokens, channel, context
        self._forward = type(model).forward
        self._names = [*signature(self._forward).parameters][1:]
        self._is_open = False
        self._output: Any = None
        self._part: Tensor | None = None
        self._next_call = 0
        run = self._run_stock if stock_loss else self._run

        @wraps(self._forward)
        def forward(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            given = dict(zip(self._names, args, strict=False)) | kwargs
            return self._forward(model, *args, **kwargs) if given.get("labels") is None else run(given)

        # transformers knows by the names of module and class which outputs it records.
        inner = model.get_submodule(base)
        mix_in(model, _WithChunks, forward=forward, __module__=type(model).__module__)
        mix_in(inner, WatchedBase, head=self, __module__=type(inner).__module__)

    def call_base(self, compute: Callable[[], Any]) -> Any:
        """Return what the base model returns to the class.

        Args:
            compute: calls the base model itself.
        """
        if not self._is_open:
            return compute()
        if self._part is None:
            self._output, self._next_call = compute(), self._channel.position
            # The class goes on with one token. Its result is not used.
            return with_states(self._output, states_of(self._output)[:1, :1].detach())
        self._channel.position = self._next_call
        return with_states(self._output, self._part)

    def _run(self, given: Mapping[str, Any]) -> ModelOutput:
        """Run the model, and return the loss of the labels with its output, without logits."""
        inputs = {name: value for name, value in given.items() if name != "labels"}
        with self._opened():
            output = self._forward(self._model, **inputs)
            loss = self._summed(output.logits, given["labels"], self.loss_function)
        return _with_loss(output, loss)

    def _run_stock(self, given: Mapping[str, Any]) -> ModelOutput:
        """Run the model with its own loss, and return its output without logits.

        Raises:
            ModelError: if the result is to be a tuple, or the class has computed another loss.
        """
        if given.get("return_dict") is False:
            raise ModelError(
                "return_dict = False with loss.chunk_tokens: without logits, a tuple does not say what it holds",
                "leave return_dict out, or set loss.chunk_tokens = 0",
            )
        with self._opened(), loss_replaced(self._model, self._stock_loss):
            output = self._forward(self._model, **given)
            is_summed = self._part is not None
        if not is_summed:
            raise ModelError(
                f"a {type(self._model).__name__} computes its loss itself, not by the loss function of transformers",
                "set loss.chunk_tokens = 0",
            )
        return _with_loss(output, output.loss)

    def _stock_loss(
        self,
        stock: Callable[..., Tensor],
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the loss that transformers computes from all logits, from those of chunks.

        Args:
            stock: transformers' loss.
            logits: of one token.

        The other arguments are those of `stock`. Without any label that counts the loss is 0.
        """
        targets, number = next_tokens(labels, shift_labels, num_items_in_batch, ignore_index)
        shared = {"vocab_size": vocab_size, "num_items_in_batch": number, "ignore_index": ignore_index}
        loss = self._summed(
            logits,
            targets if self._context is None else self._context.own(targets),
            lambda logits, targets: stock(logits, labels=targets, shift_labels=targets, **shared, **kwargs),
        )
        return loss if self._context is None else self._context.summed(loss)

    def _summed(self, logits: Tensor, labels: Tensor, loss_function: LossFunction) -> Tensor:
        """Return the sum of the loss over chunks.

        Args:
            logits: of one token; their graph has the parameters of the head, and no others.
            labels: (batch, seq).
            loss_function: of logits and labels (1, tokens).
        """
        with _stand_ins(self._model, leaves_of(logits)) as parameters:
            return sum_over_chunks(
                states_of(self._output),
                labels,
                lambda part, targets: loss_function(self._logits(part), targets),
                self._chunk_tokens,
                parameters,
            )

    def _logits(self, part: Tensor) -> Tensor:
        """Return the logits (1, tokens, vocab) of hidden states (1, tokens, hidden)."""
        self._channel.position, self._part = 0, part
        return logits_without_base(self._forward, self._model, part)

    @contextmanager
    def _opened(self) -> Iterator[None]:
        self._is_open = True
        try:
            yield
        finally:
            self._is_open, self._output, self._part = False, None, None


@contextmanager
def _stand_ins(model: nn.Module, parameters: Sequence[Tensor]) -> Iterator[dict[Tensor, Tensor]]:
    """Yield parameters -> tensors with the same values, which replace them while the block runs."""
    replaced = {parameter: parameter.detach().requires_grad_() for parameter in parameters}
    tables = [parameter_table(module) for module in model.modules()] if parameters else []
    slots = [(table, name, own) for table in tables for name, own in table.items() if own in replaced]
    assert {own for _, _, own in slots} == replaced.keys(), "the head has a parameter that no module holds"
    for table, name, own in slots:
        table[name] = replaced[own]
    try:
        yield replaced
    finally:
        for table, name, own in slots:
            table[name] = own


class _WithChunks:
    """Mixin for the model; it only marks it."""


class CallsBase(Protocol):
    """A head that decides what a call of the base model returns to the class."""

    def call_base(self, compute: Callable[[], Any]) -> Any:
        """Return the result; `compute` calls the base model itself."""


class WatchedBase:
    """Mixin for the base model: where the head alone runs, nothing in it and no hook of it runs.

    It surrounds the whole call for this.
    """

    head: CallsBase

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__  # type: ignore[misc]
        return self.head.call_base(lambda: call(*args, **kwargs))


def take_loss(output: Tensor, labels: Tensor) -> Tensor:
    """Return the loss that the last stage has computed: the loss function around a chunked head."""
    return output


def logits_without_base(forward: Callable[..., Any], model: PreTrainedModel, states: Tensor) -> Tensor:
    """Return the logits that a class makes around a base model that does not run.

    Args:
        forward: of the class.
        model: of the class; its base model returns `states`.
        states: (batch, seq, hidden)

    Returns:
        (batch, seq, vocab) or this process's (batch, seq, vocab/tp).
    """
    # The base model does not read them.
    ids = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
    logits: Tensor = forward(model, input_ids=ids, use_cache=False, **no_router_logits(model)).logits
    return logits


def states_of(output: Any) -> Tensor:
    """Return the hidden states in the output of a base model, (batch, seq, hidden)."""
    states: Tensor = output if isinstance(output, Tensor) else output[0]
    return states


def with_states(output: Any, states: Tensor) -> Any:
    """Return the output of a base model with other hidden states."""
    if isinstance(output, Tensor):
        return states
    if isinstance(output, ModelOutput):
        return type(output)(**{**output, next(iter(output)): states})
    return (states, *output[1:])


def _with_loss(output: ModelOutput, loss: Tensor) -> ModelOutput:
    fields = {name: value for name, value in output.items() if name not in ("loss", "logits")}
    return type(output)(loss=loss, **fields)
