"""Values that transformers uses though no configuration class declares them, as `head_dim` of `glm4_moe`.

Published configurations have such values. Whether one is used is found out by asking transformers, not its source.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationMixin, PretrainedConfig, PreTrainedModel


def names_used(config: PretrainedConfig) -> set[str]:
    """Return the names that a class asks a configuration for while the model is built.

    Names that transformers asks of every class do not count, nor does any name if the model comes with its own code.
    """
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return set() if kind is None else _names_read(kind, config) - _names_read(_Bare, PretrainedConfig())


class _Bare(PreTrainedModel, GenerationMixin):
    """A model without modules. What it asks for says nothing of a class, nor do the former names of rotary settings."""

    config_class = PretrainedConfig
    supports_gradient_checkpointing = True

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        config.rope_parameters = {"rope_type": "default", "rope_theta": 1.0}
        config.standardize_rope_params()
        self.post_init()  # type: ignore[no-untyped-call]


def _names_read(kind: Any, config: PretrainedConfig) -> set[str]:
    read: set[str] = set()
    stock = type(config)

    def read_and_note(self: PretrainedConfig, name: str) -> Any:
        read.add(name)
        return stock.__getattribute__(self, name)

    noting = copy.deepcopy(config)
    noting.__class__ = type(stock.__name__, (stock,), {"__getattribute__": read_and_note})
    # Of some types no model can be built from the defaults. What was read before counts.
    with torch.device("meta"), suppress(Exception):
        kind._from_config(noting)
    return read


def changes_others(build: Callable[[dict[str, Any]], PretrainedConfig], name: str, value: object) -> bool:
    """Whether a value changes declared ones of a configuration, as `rope_theta` changes `rope_parameters`.

    Args:
        build: makes a configuration of values.
    """
    values = [value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        # The value itself may be the default.
        values.append(2 * value + 1)
    declared = build({}).to_dict()
    others = [build({name: each}).to_dict() for each in values]
    return any(other.get(key) != declared[key] for other in others for key in declared if key != name)
