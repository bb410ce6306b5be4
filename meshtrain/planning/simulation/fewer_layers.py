"""A model with some of its decoder layers left out, and whether that changes the others."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from meshtrain.models.refusals import REFUSALS
from meshtrain.models.tiny import LAYER_COUNTS
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.parallel.cut.trace import OUTPUT, Call, Trace


class LayersNeededError(Exception):
    """Raised when a model cannot be simulated with fewer layers; the message says why."""


def keep_layers(model: PreTrainedModel, kept: Sequence[int]) -> None:
    """Leave out all but some decoder layers of a model on the meta device, in place.

    The layers are those of the full model. Their configuration has fewer layers.

    Args:
        kept: indices of the layers that stay, ascending.

    Raises:
        LayersNeededError: if something else in the model has as many parts as there are layers.
    """
    name, layers = find_layers(model)
    if len(kept) == len(layers):
        return
    _check_lists(model, layers)
    numbers = {*_layer_numbers(layers)}
    configs = {id(it.config): it.config for it in model.modules() if isinstance(it, PreTrainedModel)}
    configs |= {id(text): text for text in (it.get_text_config() for it in configs.values())}
    for config in configs.values():
        _shorten(config, kept, len(layers))
    for position, index in enumerate(kept):
        for path, module in layers[index].named_modules():
            vars(module).update((name, position) for name in vars(module) if (path, name) in numbers)
    model.set_submodule(name, nn.ModuleList(layers[index] for index in kept))


def stream_problem(trace: Trace) -> str | None:
    """Return what the layers of a model exchange besides the result of the one before.

    Args:
        trace: of its forward pass.

    Returns:
        The problem in words, or None.
    """
    layers = [call.layer for call in trace.calls if call.layer is not None]
    if not layers or layers != sorted({*layers}):
        return "it calls a layer more than once, or not in order"
    for call in trace.calls:
        is_between = call.layer is None and layers[0] <= call.after < layers[-1]
        before = layers[-1] if call.layer is None else call.layer - 1
        if is_between or call.written or not _sources(trace, call) <= {None, before}:
            what = "the logits are" if call.name == OUTPUT else f"{call.name} is"
            return f"{what} computed from more than the result of one layer"
    return None


def _sources(trace: Trace, call: Call) -> set[int | None]:
    """Return the layers whose results a call gets; None for another part."""
    sources = (source for seen in call.inputs.values() for source in seen.sources)
    return {trace.calls[source].layer for source in sources if isinstance(source, int)}


def _check_lists(model: PreTrainedModel, layers: nn.ModuleList) -> None:
    counts = Counter(id(parameter) for layer in layers for parameter in layer.parameters())
    if any(number > 1 for number in counts.values()):
        raise LayersNeededError("its layers share parameters")
    inside = {id(module) for module in layers.modules()}
    lists = ((name, it) for name, it in model.named_modules() if isinstance(it, nn.ModuleList | nn.ParameterList))
    for name, found in lists:
        if id(found) not in inside and len(found) == len(layers):
            raise LayersNeededError(f"{name} has an entry for each layer")


def _layer_numbers(layers: nn.ModuleList) -> Iterator[tuple[str, str]]:
    """Yield each module in a layer, and its attribute, that hold the index of the layer."""
    found: dict[tuple[str, str], bool] = {}
    for index, layer in enumerate(layers):
        for path, module in layer.named_modules():
            for attribute, value in vars(module).items():
                if type(value) is int:
                    key = path, attribute
                    found[key] = found.get(key, True) and value == index
    return (key for key, is_number in found.items() if is_number)


def _shorten(config: PretrainedConfig, kept: Sequence[int], num_layers: int) -> None:
    """Set the number of layers in a configuration, and leave out entries of lists of all layers."""
    if getattr(config, "is_heterogeneous", False):
        raise LayersNeededError("its layers have configurations of their own")
    counts = {config.attribute_map.get(name, name) for name in LAYER_COUNTS}
    for name, value in config.to_dict().items():
        changed: Any = None
        if name in counts and value == num_layers:
            changed = len(kept)
        elif isinstance(value, list | tuple) and len(value) == num_layers:
            changed = type(value)(value[index] for index in kept)
        if changed is not None:
            _set(config, name, changed)


def _set(config: PretrainedConfig, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except (AttributeError, *REFUSALS) as error:
        raise LayersNeededError(f"its configuration refuses {name} = {value}: {error}") from error
