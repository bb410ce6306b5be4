"""Tiny copies of a model that have every kind of its decoder layers."""

import re
from collections.abc import Callable, Iterable, Mapping

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from meshtrain.compat.transformers import loop_over_experts
from meshtrain.errors import ModelError
from meshtrain.models.tiny import HEADS, SHORT, shrink
from meshtrain.parallel.cut.probe import find_layers, shared_parameters

MAX_LAYERS = 16
LayerKind = tuple[str | None, frozenset[str], frozenset[str]]
"""The layer type in the configuration, the classes of its modules, and the names of its
parameters without numbers."""


def tiny_config(
    config: PretrainedConfig,
    num_layers: int,
    *,
    tp: int = 1,
    heads: int = HEADS,
    keys: int | None = None,
    short: int = SHORT,
    block: int = 1,
    in_turn: bool = False,
) -> PretrainedConfig:
    """Return a tiny configuration, as `shrink` does, for a copy that computes in float64.

    Args:
        config: of the model itself. A class that comes with the model stays.

    The other arguments are those of `shrink`.

    Raises:
        ModelError: if transformers refuses it.
    """
    tiny = shrink(config, num_layers, tp=tp, heads=heads, keys=keys, short=short, block=block, in_turn=in_turn)
    if code := getattr(config, "auto_map", None):
        tiny.auto_map = code
        tiny.name_or_path = config.name_or_path
    # Experts use a grouped matrix product by default, which does not support float64.
    loop_over_experts(tiny)
    return tiny


def copy_with_all_kinds(
    kinds: Mapping[tuple[LayerKind, bool], str],
    numbers: Iterable[int],
    make: Callable[..., PretrainedConfig],
    build: Callable[[PretrainedConfig], PreTrainedModel],
) -> tuple[int, PretrainedConfig, PreTrainedModel]:
    """Return the smallest copy that has every kind of layer, and its number of layers.

    Args:
        kinds: what `layer_kinds` returns for the model itself.
        numbers: of layers, ascending.
        make: number of layers, and whether their kinds take turns (by keyword) -> configuration
            of a copy.
        build: configuration -> model.

    Raises:
        ModelError: if no copy is small enough, or the smallest of all cannot be built.
    """
    count, found, refusal = 0, dict[tuple[LayerKind, bool], str](), None
    # Between layers that share a block there may be many others.
    in_turn = any(shares for _, shares in kinds)
    for number in numbers:
        try:
            tiny = make(number, in_turn=in_turn)
            model = build(tiny)
        except ModelError as error:
            # A class may refuse this number of layers, and accept the next.
            refusal = refusal or error
            continue
        found = layer_kinds(model)
        count = number
        if found.keys() >= kinds.keys():
            return number, tiny, model
    if refusal is not None and count == 0:
        raise refusal
    (kind, shares), name = next(item for item in kinds.items() if item[0] not in found)
    what = f"{name} of the {tiny.model_type} is of a kind of layer that no tiny copy with up to {count} layers has"
    if shares and (kind, False) in found:
        what = (
            f"{name} of the {tiny.model_type} shares parameters with another layer, as no layer of its kind does in a "
            f"tiny copy with up to {count} layers"
        )
    raise ModelError(what)


def layer_kinds(model: PreTrainedModel) -> dict[tuple[LayerKind, bool], str]:
    """Return every kind of decoder layer, with the FQN of the first layer of the kind.

    Layers that share parameters with others (True) are a kind of their own.
    """
    try:
        name, layers = find_layers(model)
    except ModelError:
        # The check of the plan decides whether it needs the layers.
        return {}
    shared, kinds = shared_parameters(layers), dict[tuple[LayerKind, bool], str]()
    for index, (kind, layer) in enumerate(zip(kinds_of_layers(model), layers, strict=False)):
        kinds.setdefault((kind, not shared.isdisjoint(layer.parameters())), f"{name}.{index}")
    return kinds


def kinds_of_layers(model: PreTrainedModel) -> list[LayerKind]:
    """Return the kind of each decoder layer.

    Raises:
        ModelError: if the model has no list of layers.
    """
    _, layers = find_layers(model)
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or [None] * len(layers)
    return [_kind(layer_type, layer) for layer_type, layer in zip(layer_types, layers, strict=False)]


def _kind(layer_type: str | None, layer: nn.Module) -> LayerKind:
    # The number of experts does not change the kind.
    names = frozenset(re.sub(r"\d+", "*", name) for name, _ in layer.named_parameters())
    return layer_type, frozenset(type(module).__name__ for module in layer.modules()), names
