"""Whether the head of a class may run in chunks: a tiny copy is tried, and no class is listed."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.compat.transformers import has_loss_of_program
from meshtrain.config.data import IGNORE_INDEX
from meshtrain.errors import ModelError
from meshtrain.models.build import stock_class
from meshtrain.models.tiles import seeded_by
from meshtrain.parallel.cut.probe import MISFITS, find_layers
from meshtrain.parallel.cut.stubs import Channel
from meshtrain.parallel.head.chunks import ChunkedHead
from meshtrain.parallel.tiny_model import inputs_of, tiny_model, tried_once

# A chunk ends inside of a row.
CHUNK = 3
CLOSE = 1e-4
"""Largest difference that is rounding, relative to the largest value: the copy is float32."""
SMALLEST = 1e-3
"""Smallest scale of a value, relative to the largest of all."""


def find_base(model: PreTrainedModel, *, stock_loss: bool = False) -> str:
    """Return the name of the base model of a model whose head may run in chunks.

    A tiny copy computes the loss of some tokens and its gradients with all logits, and then with
    those of chunks that end inside of a row. Both must be equal.

    Args:
        model: on meta, not cut; it is not changed.
        stock_loss: whether the loss is that of the class.

    Raises:
        ModelError: if they differ, or the class cannot be tried.
    """
    if stock_loss and has_loss_of_program(model):
        raise _refused(stock_class(model), "the program has set model.loss_function")
    return _find_base(model, stock_loss=stock_loss)


@tried_once
def _find_base(model: PreTrainedModel, *, stock_loss: bool) -> str:
    kind = stock_class(model)
    loss = _stock_loss if stock_loss else _sum
    try:
        copy = tiny_model(model, 1, dtype=torch.float32).eval()
        base, whole = _base_called(copy), _results(copy, loss)
    except (ModelError, *MISFITS) as error:
        raise _refused(kind, f"no tiny copy of it runs ({type(error).__name__}: {error})") from error
    if base is None:
        raise _refused(kind, "no module around its layers leaves out the head")
    head = ChunkedHead(copy, base, CHUNK, Channel(), stock_loss=stock_loss)
    head.loss_function = _cross_entropy
    try:
        parts = _results(copy, loss)
    except MISFITS as error:
        raise _refused(kind, "it computes its loss itself, or from more than the hidden states of a token") from error
    sizes = {name: float(wanted.abs().max()) for name, wanted in whole.items()}
    # Some gradients are only rounding, such as that of a bias of keys.
    smallest = SMALLEST * max(sizes.values())
    for name, wanted in whole.items():
        if not torch.allclose(parts[name], wanted, rtol=0.0, atol=CLOSE * max(sizes[name], smallest)):
            raise _refused(kind, f"a logit is not made from one position, or the loss not from logits: {name} differs")
    return base


def _refused(kind: type, reason: str) -> ModelError:
    return ModelError(f"the head of a {kind.__name__} cannot run in chunks: {reason}", "set loss.chunk_tokens = 0")


def _base_called(copy: PreTrainedModel) -> str | None:
    """Return the outermost module around the layers that a forward pass calls."""
    layers, _ = find_layers(copy)
    parts = layers.split(".")[:-1]
    called: list[str] = []
    handles = [
        copy.get_submodule(name).register_forward_hook(_noting(name, called))
        for name in (".".join(parts[: number + 1]) for number in range(len(parts)))
    ]
    try:
        _run(copy)
    finally:
        for handle in handles:
            handle.remove()
    return min(called, key=len, default=None)


def _noting(name: str, called: list[str]) -> Callable[..., None]:
    def note(module: nn.Module, args: object, output: object) -> None:
        called.append(name)

    return note


def _run(copy: PreTrainedModel, **labels: Tensor) -> Any:
    # Some classes draw random numbers in their forward pass.
    with seeded_by("forward"):
        return copy(**inputs_of(copy), use_cache=False, **labels)


def _labels(copy: PreTrainedModel) -> Tensor:
    labels: Tensor = inputs_of(copy)["input_ids"].flip(1)
    labels[0, 2] = labels[1, -1] = IGNORE_INDEX
    return labels


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def _sum(copy: PreTrainedModel, labels: Tensor) -> Tensor:
    output = _run(copy, **({"labels": labels} if _is_chunked(copy) else {}))
    return output.loss if _is_chunked(copy) else _cross_entropy(output.logits, labels)


def _stock_loss(copy: PreTrainedModel, labels: Tensor) -> Tensor:
    loss: Tensor = _run(copy, labels=labels).loss
    return loss


def _is_chunked(copy: PreTrainedModel) -> bool:
    return type(copy) is not stock_class(copy)


def _results(copy: PreTrainedModel, loss_of: Callable[[PreTrainedModel, Tensor], Tensor]) -> dict[str, Tensor]:
    """Return the loss and the gradient of every parameter, zeros where there is none."""
    copy.zero_grad(set_to_none=True)
    loss = loss_of(copy, _labels(copy))
    loss.backward()
    gradients = {
        f"the gradient of {name}": torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in copy.named_parameters()
    }
    return {"the loss": loss.detach(), **gradients}
