"""The causal LM class of a text model, made where transformers has none."""

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PretrainedConfig, PreTrainedModel

from meshtrain.compat.causal_head import add_causal_class

WHOLE_KEY = "whole_model"
"""The value of a configuration that names the whole model: the configuration is of its half."""


def is_half(config: PretrainedConfig) -> bool:
    """Return whether a configuration is of the language half of a multimodal model."""
    return bool(getattr(config, WHOLE_KEY, None))


def causal_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the causal LM class of a configuration, or None if there is none.

    Some multimodal types have a text model without such a class. It is made for the language half,
    and registered: `AutoModelForCausalLM` builds it from then on, in this process.
    """
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is not None or not is_half(config):
        return kind
    text_class: Any = MODEL_MAPPING.get(type(config), None)
    return None if text_class is None else add_causal_class(text_class, type(config))
