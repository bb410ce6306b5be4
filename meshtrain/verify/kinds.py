"""What kinds of decoder layers a model has: a tiny copy proves nothing about a kind that it has not."""

import re

from torch import nn
from transformers import PreTrainedModel

from meshtrain.errors import ModelError
from meshtrain.parallel.cut.probe import find_layers

Kind = tuple[str | None, frozenset[str], frozenset[str]]
"""What the configuration calls the layer, the classes of its modules, the names of its parameters without numbers."""


def layer_kinds(model: PreTrainedModel) -> dict[Kind, str]:
    """Return every kind of decoder layer, with the FQN of the first layer of the kind."""
    try:
        name, layers = find_layers(model)
    except ModelError:
        # Whether a plan can do without knowing the layers is for the check of the plan to say.
        return {}
    words = getattr(model.config.get_text_config(), "layer_types", None) or [None] * len(layers)
    kinds: dict[Kind, str] = {}
    for index, (word, layer) in enumerate(zip(words, layers, strict=False)):
        kinds.setdefault(_kind(word, layer), f"{name}.{index}")
    return kinds


def _kind(word: str | None, layer: nn.Module) -> Kind:
    # How many experts there are makes no other kind.
    names = frozenset(re.sub(r"\d+", "*", name) for name, _ in layer.named_parameters())
    return word, frozenset(type(module).__name__ for module in layer.modules()), names
