"""The kinds of decoder layers of a model: a tiny copy proves only the kinds that it has."""

import re

from torch import nn
from transformers import PreTrainedModel

from meshtrain.errors import ModelError
from meshtrain.parallel.cut.probe import find_layers

Kind = tuple[str | None, frozenset[str], frozenset[str]]
"""The layer type in the configuration, the classes of its modules, and the names of its
parameters without numbers."""


def layer_kinds(model: PreTrainedModel) -> dict[Kind, str]:
    """Return every kind of decoder layer, with the FQN of the first layer of the kind."""
    try:
        name, layers = find_layers(model)
    except ModelError:
        # The check of the plan decides whether it needs the layers.
        return {}
    words = getattr(model.config.get_text_config(), "layer_types", None) or [None] * len(layers)
    kinds: dict[Kind, str] = {}
    for index, (word, layer) in enumerate(zip(words, layers, strict=False)):
        kinds.setdefault(_kind(word, layer), f"{name}.{index}")
    return kinds


def _kind(word: str | None, layer: nn.Module) -> Kind:
    # The number of experts does not change the kind.
    names = frozenset(re.sub(r"\d+", "*", name) for name, _ in layer.named_parameters())
    return word, frozenset(type(module).__name__ for module in layer.modules()), names
