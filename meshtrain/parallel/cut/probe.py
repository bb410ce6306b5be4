"""Find the decoder layers of an unmodified Hugging Face model, and the modules around them.

Nothing here knows a model family. One forward pass on the meta device, with every layer
short-circuited, shows what the model calls before and after the layers.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.compat.autograd import tensors_in, times_changed
from meshtrain.compat.nn import forwards_replaced
from meshtrain.errors import ModelError
from meshtrain.models.probe_inputs import PROBE_LENGTH, probe_ids, probe_mask
from meshtrain.models.rotary import probed
from meshtrain.parallel.cut.dataflow import DerivedTensors
from meshtrain.parallel.cut.hooks import hooks_disabled

# Errors of a forward pass when a model is built in another way than a probe expects.
MISFITS = (TypeError, ValueError, AttributeError, RuntimeError, IndexError, KeyError, AssertionError)


@dataclass(frozen=True)
class ModelStructure:
    """What the cut needs to know about a model.

    Attributes:
        layers: FQN of the ModuleList of decoder layers.
        num_layers: length of that list.
        before: FQN of each module called before the first layer (embeddings, rotary, dropout) ->
            shape of its result for one sequence of `PROBE_LENGTH` tokens; None if the result is not
            one tensor.
        after: FQNs of the modules called after the last layer (final norm, head), in call order.
        layers_return_tuples: whether the model unpacks the result of a layer.
        takes_ready_mask: whether the model takes a 4-D attention mask; if not, it makes its own
            from a 2-D one.
        writes_in_place: whether the model changes the results of the modules before the layers in
            place, instead of a copy.
    """

    layers: str
    num_layers: int
    before: Mapping[str, torch.Size | None]
    after: tuple[str, ...]
    layers_return_tuples: bool
    takes_ready_mask: bool
    writes_in_place: bool


def find_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the name and the ModuleList of the decoder layers.

    It is the outermost list of the configured length, and the one with most parameters if there are
    several.

    Raises:
        ModelError: if there is none, or the configuration has no number of layers.
    """
    config = model.config.get_text_config()
    if not hasattr(config, "num_hidden_layers"):
        raise ModelError(f"the configuration of {type(model).__name__} has no number of decoder layers")
    # A decoder of an encoder-decoder configuration has both numbers.
    expected = getattr(config, "decoder_layers", config.num_hidden_layers)
    candidates = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == expected and any(True for _ in module.parameters())
    ]
    if not candidates:
        raise ModelError(
            f"{type(model).__name__} has no list of {expected} decoder layers, so it cannot be cut or sharded by layer"
        )
    return min(candidates, key=lambda item: (item[0].count("."), -sum(p.numel() for p in item[1].parameters())))


def probe_structure(model: PreTrainedModel) -> ModelStructure:
    """Return the structure of a meta model, from a forward pass in which no layer computes.

    Raises:
        ModelError: if the layers are not called once each, in a chain of one tensor, or if a
            parameter does not belong to one stage.
    """
    name, layers = find_layers(model)
    failures = []
    for with_mask, as_tuple in itertools.product((True, False), (False, True)):
        try:
            with hooks_disabled(model):
                structure = _Probe(model, name, layers, as_tuple=as_tuple).run(with_mask=with_mask)
        except MISFITS as error:
            failures.append(error)
        else:
            _check_positions(model, structure)
            return structure
    # A RuntimeError of torch is often about the mask of the probe instead of the layers: XLNet
    # calculates with the mask.
    reason = next((failure for failure in failures if not isinstance(failure, RuntimeError)), failures[0])
    raise cannot_be_cut(
        model,
        f"its layers do not pass one hidden state to each other, and nothing else ({type(reason).__name__}: {reason})",
    )


def asks_for_router_loss(model: PreTrainedModel) -> bool:
    """Return whether the configuration asks for the auxiliary loss of the routers."""
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False))


def no_router_logits(model: PreTrainedModel) -> dict[str, bool]:
    """Return the arguments that keep a forward pass from collecting router logits.

    A stage has only the logits of its own layers.
    """
    return {"output_router_logits": False} if asks_for_router_loss(model) else {}


def cannot_be_cut(model: PreTrainedModel, reason: str) -> ModelError:
    """Return the error for a model that runs on one stage only."""
    return ModelError(f"{type(model).__name__} cannot be cut into stages: {reason}", "use pp = 1")


class _Probe:
    """A forward pass on meta in which no layer computes, and what it records.

    Args:
        model: the full model.
        name: FQN of the list of its layers.
        layers: this list.
        as_tuple: whether a layer returns a tuple.
    """

    def __init__(self, model: PreTrainedModel, name: str, layers: nn.ModuleList, *, as_tuple: bool) -> None:
        self._model, self._name, self._layers, self._as_tuple = model, name, layers, as_tuple
        self._hidden_shape = (1, PROBE_LENGTH, model.config.get_text_config().hidden_size)
        self._before: dict[str, torch.Size | None] = {}
        self._after: list[str] = []
        # Results of the modules before the layers, and how often each had been changed in place.
        self._results: list[tuple[Tensor, int]] = []
        self._hidden_states: list[Tensor] = []
        # Tensors that a later stage does not have: the tokens, and all that is computed from them
        # or from parameters before its layers.
        self._elsewhere = DerivedTensors()

    def run(self, *, with_mask: bool) -> ModelStructure:
        """Run the model, and return its structure."""
        model = self._model
        ids = probe_ids(next(model.parameters()).device)
        self._elsewhere.add([ids, *model.parameters()])
        with (
            forwards_replaced(self._layers, self._pass_through),
            _eval_mode(model),
            probed(model, PROBE_LENGTH),
            _hooks(model, _siblings(model, self._name), self._hook_for),
            self._elsewhere,
        ):
            mask = probe_mask(ids.device, with_mask=with_mask)
            output = model(input_ids=ids, **mask, **no_router_logits(model), use_cache=False)
        if len(self._hidden_states) != len(self._layers):
            raise ValueError(f"{len(self._hidden_states)} of {len(self._layers)} layers were called")
        if self._elsewhere.has(output.logits):
            raise ValueError("the logits are computed from more than the output of the last layer")
        return ModelStructure(
            layers=self._name,
            num_layers=len(self._layers),
            before=self._before,
            after=tuple(dict.fromkeys(self._after)),
            layers_return_tuples=self._as_tuple,
            takes_ready_mask=with_mask,
            writes_in_place=any(times_changed(tensor) != version for tensor, version in self._results),
        )

    def _pass_through(self, *args: Any, **kwargs: Any) -> Any:
        """Replace the forward of every layer."""
        hidden = args[0] if args else kwargs["hidden_states"]
        self._check_inputs(hidden, (args[1:], kwargs))
        output = torch.empty_like(hidden)
        self._hidden_states.append(output)
        if len(self._hidden_states) < len(self._layers):
            self._elsewhere.add([output])
        else:
            # The modules after the layers may use parameters from before, because the head may be
            # tied to the embedding.
            self._elsewhere.drop(self._model.parameters())
        return (output,) if self._as_tuple else output

    def _check_inputs(self, hidden: Any, others: Any) -> None:
        # A computation between two layers would run twice if the layers are on two stages.
        if not isinstance(hidden, Tensor) or (self._hidden_states and hidden is not self._hidden_states[-1]):
            raise TypeError("a layer receives something else than the hidden state of the layer before")
        if hidden.shape != self._hidden_shape:
            raise TypeError(f"a hidden state is {tuple(hidden.shape)} and not {self._hidden_shape}")
        if any(self._elsewhere.has(tensor) for tensor in tensors_in(others) if tensor is not hidden):
            raise TypeError("a layer receives a second tensor that was computed from parameters or tokens")

    def _hook_for(self, sibling: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            if self._hidden_states:
                self._after.append(sibling)
            else:
                self._before[sibling] = output.shape if isinstance(output, Tensor) else None
                self._results.extend((tensor, times_changed(tensor)) for tensor in tensors_in(output))

        return hook


def _check_positions(model: PreTrainedModel, structure: ModelStructure) -> None:
    """Check that every parameter belongs to one stage.

    The weight of a head that is tied to the embedding is excepted.

    Raises:
        ModelError: for a parameter or a tie that does not.
    """
    positions = {name: _positions(name, structure) for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, found in positions.items():
        if not found:
            raise cannot_be_cut(model, f"its parameter {name} is used neither before, in nor after the layers")
        if len(found) > 1:
            raise cannot_be_cut(model, f"its parameter {name} is used before and after the layers")
    for copy_name, source in model.all_tied_weights_keys.items():
        ends = (*positions[source], *positions[copy_name])
        # Two ends before the first layer, or two after the last, are on one stage.
        if ends != ("before", "after") and (ends[0] != ends[1] or "layers" in ends):
            raise cannot_be_cut(model, f"it ties {copy_name} to {source}, which are not the head and the embedding")


def _positions(parameter: str, structure: ModelStructure) -> list[str]:
    modules = {"layers": (structure.layers,), "before": structure.before, "after": structure.after}
    return [
        position for position, names in modules.items() if parameter.startswith(tuple(f"{name}." for name in names))
    ]


def _siblings(model: nn.Module, layers: str) -> list[str]:
    """Return the FQNs of the siblings of the layer list and of each module around it."""
    siblings, module, prefix = [], model, ""
    for part in layers.split("."):
        siblings += [f"{prefix}{name}" for name, child in module.named_children() if name != part]
        module = module.get_submodule(part)
        prefix += f"{part}."
    return siblings


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


@contextmanager
def _hooks(model: nn.Module, names: Iterable[str], hook_for: Callable[[str], Callable[..., None]]) -> Iterator[None]:
    handles = [model.get_submodule(name).register_forward_hook(hook_for(name)) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
