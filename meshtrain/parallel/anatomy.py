"""Where the decoder layers of an unmodified Hugging Face model are, and what it calls before and after them.

Nothing here knows a model family: one forward pass on the meta device, with every layer short-circuited, tells.
"""

import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from meshtrain.errors import ModelError

PROBE_LENGTH = 3
# What a forward pass raises when a model is built another way than a probe expects.
MISFITS = (TypeError, ValueError, AttributeError, RuntimeError, IndexError, KeyError, AssertionError)


@dataclass(frozen=True)
class Anatomy:
    """What the cut needs to know of a model.

    Attributes:
        layers: FQN of the ModuleList of decoder layers.
        num_layers: its length.
        before: FQNs of the modules called before the first layer (embeddings, rotary, dropout).
        after: FQNs of the modules called after the last layer (final norm, head), in call order.
        layers_return_tuples: whether the model unpacks the result of a layer.
        takes_ready_mask: whether it takes a 4-D attention mask (else it makes its own from a 2-D one).
    """

    layers: str
    num_layers: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    layers_return_tuples: bool
    takes_ready_mask: bool


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
    for with_mask, as_tuple in itertools.product((True, False), (False, True)):
        try:
            before, after = _probe(model, name, layers, as_tuple=as_tuple, with_mask=with_mask)
        except MISFITS as error:
            failures.append(error)
        else:
            anatomy = Anatomy(name, len(layers), tuple(before), tuple(after), as_tuple, with_mask)
            _check_places(model, anatomy)
            return anatomy
    raise cannot_be_cut(
        model,
        "its layers do not hand one hidden state to each other, and nothing else "
        f"({type(failures[0]).__name__}: {failures[0]})",
    )


def cannot_be_cut(model: PreTrainedModel, reason: str) -> ModelError:
    """Return the error that says why a model runs on one stage only."""
    return ModelError(f"{type(model).__name__} cannot be cut into stages: {reason}; use pp = 1")


def _probe(
    model: PreTrainedModel, name: str, layers: nn.ModuleList, *, as_tuple: bool, with_mask: bool
) -> tuple[list[str], list[str]]:
    before: list[str] = []
    after: list[str] = []
    embedded: set[Node] = set()
    handed_on: list[Tensor] = []
    hidden_shape = (1, PROBE_LENGTH, model.config.get_text_config().hidden_size)

    def pass_through(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        # Whatever happens between two layers would happen twice where they lie on two stages.
        if not isinstance(hidden, Tensor) or (handed_on and hidden is not handed_on[-1]):
            raise TypeError("a layer receives something else than the hidden state of the layer before")
        if hidden.shape != hidden_shape:
            raise TypeError(f"a hidden state is {tuple(hidden.shape)} and not {hidden_shape}")
        # A later stage has no embedding to compute it from.
        if any(tensor.requires_grad for tensor in _tensors((args[1:], kwargs)) if tensor is not hidden):
            raise TypeError("a layer receives a second tensor that was computed from parameters")
        handed_on.append(hidden.detach())
        return (handed_on[-1],) if as_tuple else handed_on[-1]

    def note(sibling: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            seen = after if handed_on else before
            if sibling not in seen:
                seen.append(sibling)
            if not handed_on:
                embedded.update(tensor.grad_fn for tensor in _tensors(output) if tensor.grad_fn is not None)

        return hook

    with _short_circuit(layers, pass_through), _eval_mode(model):
        handles = [
            model.get_submodule(sibling).register_forward_hook(note(sibling)) for sibling in _siblings(model, name)
        ]
        try:
            device = next(model.parameters()).device
            output = model(input_ids=probe_ids(device), **probe_mask(device, with_mask=with_mask), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
    if len(handed_on) != len(layers):
        raise ValueError(f"{len(handed_on)} of {len(layers)} layers were called")
    if _stems_from(output.logits, embedded):
        raise ValueError("the logits are computed from the embedding as well, past the layers")
    return before, after


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _stems_from(tensor: Tensor, origins: Collection[Node]) -> bool:
    """Tell whether one of the origins is in the graph of `tensor`."""
    seen: set[Node] = set()
    waiting = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return not seen.isdisjoint(origins)


def _check_places(model: PreTrainedModel, anatomy: Anatomy) -> None:
    """Check that every parameter has one stage to lie on, the head that is tied to the embedding excepted."""
    places = {name: _place(name, anatomy) for name, _ in model.named_parameters(remove_duplicate=False)}
    for copy_name, source in model.all_tied_weights_keys.items():
        if (places.get(source), places.get(copy_name)) != ("before", "after"):
            raise cannot_be_cut(model, f"it ties {copy_name} to {source}, which are not the head and the embedding")
    lost = [name for name, place in places.items() if place is None]
    if lost:
        raise cannot_be_cut(model, f"its parameter {lost[0]} is used neither before, in nor after the layers")


def _place(parameter: str, anatomy: Anatomy) -> str | None:
    modules = {"layers": (anatomy.layers,), "before": anatomy.before, "after": anatomy.after}
    found = (place for place, names in modules.items() if parameter.startswith(tuple(f"{name}." for name in names)))
    return next(found, None)


def probe_ids(device: torch.device) -> Tensor:
    """Return the tokens of a probe."""
    return torch.ones(1, PROBE_LENGTH, dtype=torch.long, device=device)


def probe_mask(device: torch.device, *, with_mask: bool) -> dict[str, Tensor]:
    """Return the mask of a probe. A ready 4-D one: in a 2-D one transformers looks at values, and meta has none."""
    shape = (1, 1, PROBE_LENGTH, PROBE_LENGTH)
    return {"attention_mask": torch.ones(shape, dtype=torch.bool, device=device)} if with_mask else {}


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
        # With gradients: they tell what is computed from what.
        with torch.enable_grad():
            yield
    finally:
        model.train(training)
