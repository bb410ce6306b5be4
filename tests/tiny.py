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


def shared_block_config() -> PretrainedConfig:
    """Return a tiny Zamba 2 in which two of four layers share a block."""
    config, kinds = tiny_config("zamba2"), ["linear_attention", "hybrid"] * 2
    config.update({"layers_block_type": kinds, "layer_types": kinds, "hybrid_layer_ids": [1, 3]})
    return config
