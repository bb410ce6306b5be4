"""Read the configuration of single layers, which in most models is the same for all of them."""

from typing import Any

from transformers import PretrainedConfig


def config_of_layer(config: PretrainedConfig, index: int) -> PretrainedConfig:
    """Return the configuration that a decoder layer was built from."""
    text: Any = config.get_text_config()
    own: PretrainedConfig = text.per_layer_config[index] if getattr(text, "is_heterogeneous", False) else text
    return own


def values_in_layers(config: PretrainedConfig, name: str) -> list[Any]:
    """Return the different values that the layers have for a name; None for a layer without one.

    transformers does not return a single value for a model whose layers differ.
    """
    text = config.get_text_config()
    count = text.num_hidden_layers if getattr(text, "is_heterogeneous", False) else 1
    return list(dict.fromkeys(getattr(config_of_layer(text, index), name, None) for index in range(count)))
