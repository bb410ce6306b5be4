"""What a configuration says of its layers: in most models the same of all of them."""

from typing import Any

from transformers import PretrainedConfig


def config_of_layer(config: PretrainedConfig, index: int) -> PretrainedConfig:
    """Return the configuration that a decoder layer was built from."""
    text: Any = config.get_text_config()
    own: PretrainedConfig = text.per_layer_config[index] if getattr(text, "is_heterogeneous", False) else text
    return own


def values_in_layers(config: PretrainedConfig, name: str) -> list[Any]:
    """Return the values that the layers have for a name, each once; None for one without it.

    transformers refuses to name one value for a model whose layers have several.
    """
    text = config.get_text_config()
    count = text.num_hidden_layers if getattr(text, "is_heterogeneous", False) else 1
    return list(dict.fromkeys(getattr(config_of_layer(text, index), name, None) for index in range(count)))
