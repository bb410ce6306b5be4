"""Where the decoder layers of an unmodified Hugging Face model are, and what it calls before and after them.

Nothing here knows a model family: one forward pass on the meta device, with every layer short-circuited, tells.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.errors import ModelError


@dataclass(frozen=True)
class Anatomy:
    """What the cut needs to know of a model.

    Attributes:
        layers: FQN of the ModuleList of decoder layers.
        num_layers: its length.
        before: FQNs of the modules called before the first layer (embeddings, rotary, dropout).
        after: FQNs of the modules called after the last layer (final norm, head), in call order.
        layers_return_tuples: whether the model unpacks the result of a layer.
    """

    layers: str
    num_layers: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    layers_return_tuples: bool


def find_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the name and the ModuleList of the decoder layers: the highest one of the configured length.

    Raises:
        ModelError: if there is none.
    """
    expected = model.config.get_text_config().num_hidden_layers
    candidates = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == expected and any(True for _ in module.parameters())
    ]
    if not candidates:
        raise ModelError(
            f"{type(model).__name__} has no list of {expected} decoder layers; it cannot be cut or sharded by layer"
        )
    return min(candidates, key=lambda item: (item[0].count("."), -sum(p.numel() for p in item[1].parameters())))


def examine(model: PreTrainedModel) -> Anatomy:
    """Run one forward pass of a meta model in which no layer computes, and note what is called when.

    Raises:
        ModelError: if the layers are not called once each, in a chain of one tensor.
    """
    name, layers = find_layers(model)
    failures = []
    for as_tuple in (False, True):
        try:
            before, after = _probe(model, name, layers, as_tuple)
        except (TypeError, ValueError, AttributeError, RuntimeError, IndexError, KeyError) as error:
            failures.append(error)
        else:
            return Anatomy(name, len(layers), tuple(before), tuple(after), as_tuple)
    raise ModelError(
        f"{type(model).__name__} cannot be cut into stages: its layers do not hand one hidden state to each other "
        f"({type(failures[0]).__name__}: {failures[0]}); use pp = 1"
    )


def _probe(model: PreTrainedModel, name: str, layers: nn.ModuleList, as_tuple: bool) -> tuple[list[str], list[str]]:
    before: list[str] = []
    after: list[str] = []
    calls: list[torch.Size] = []

    def pass_through(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if not isinstance(hidden, Tensor) or (calls and hidden.shape != calls[0]):
            raise TypeError("a layer receives something else than the hidden state of the layer before")
        calls.append(hidden.shape)
        return (hidden,) if as_tuple else hidden

    def note(sibling: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            seen = after if calls else before
            if sibling not in seen:
                seen.append(sibling)

        return hook

    with _short_circuit(layers, pass_through), _eval_mode(model):
        handles = [
            model.get_submodule(sibling).register_forward_hook(note(sibling)) for sibling in _siblings(model, name)
        ]
        try:
            model(**_meta_inputs(model), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
    if len(calls) != len(layers):
        raise ValueError(f"{len(calls)} of {len(layers)} layers were called")
    return before, after


def _meta_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    device = next(model.parameters()).device
    # A ready 4-D mask: with a 2-D one transformers looks at its values, which a meta tensor does not have.
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool, device=device)
    return {"input_ids": torch.ones(1, 3, dtype=torch.long, device=device), "attention_mask": mask}


def _siblings(model: nn.Module, layers: str) -> list[str]:
    """Every module that is a child of an ancestor of the layer list, but not itself such an ancestor."""
    siblings, module, prefix = [], model, ""
    for part in layers.split("."):
        siblings += [f"{prefix}{name}" for name, child in module.named_children() if name != part]
        module = module.get_submodule(part)
        prefix += f"{part}."
    return siblings


@contextmanager
def _short_circuit(layers: nn.ModuleList, forward: Callable[..., Any]) -> Iterator[None]:
    for layer in layers:
        layer.forward = forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
