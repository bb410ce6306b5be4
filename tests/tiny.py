"""Tiny configurations for tests."""

from transformers import PretrainedConfig

from meshtrain.models.tiny import default_config, shrink


def tiny_config(model_type: str, num_layers: int = 4) -> PretrainedConfig:
    """Return a tiny configuration of the language model of a type, made from its defaults.

    Raises:
        ModelError: if transformers refuses it: some sizes depend on each other in a way that only
            this class knows.
    """
    return shrink(default_config(model_type), num_layers)
