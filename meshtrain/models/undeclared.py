"""Find values that transformers uses although no configuration class declares them.

An example is `head_dim` of `glm4_moe`. Published configurations have such values. A value counts as
used if transformers reads it while it builds the model.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationMixin, PretrainedConfig, PreTrainedModel

from meshtrain.compat.transformers import build, note_reads


def names_used(config: PretrainedConfig) -> set[str]:
    """Return the names that a model class reads from a configuration while the model is built.

    Names that transformers reads for every class do not count. For a model with custom code the
    result is empty.
    """
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return set() if kind is None else _names_read(kind, config) - _names_read(_Bare, PretrainedConfig())


class _Bare(PreTrainedModel, GenerationMixin):
    """A model without modules: the names that it reads do not depend on the class of a model.

    It also reads the former names of rotary settings, which must not count either.
    """

    config_class = PretrainedConfig
    supports_gradient_checkpointing = True

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        config.rope_parameters = {"rope_type": "default", "rope_theta": 1.0}
        config.standardize_rope_params()
        self.post_init()  # type: ignore[no-untyped-call]


def _names_read(kind: Any, config: PretrainedConfig) -> set[str]:
    read: set[str] = set()
    # Some types cannot be built from their defaults. The names read before the error count.
    with torch.device("meta"), suppress(Exception):
        build(kind, note_reads(config, read.add))
    return read


def changes_others(build: Callable[[dict[str, Any]], PretrainedConfig], name: str, value: object) -> bool:
    """Return whether a value changes declared values of a configuration.

    For example, `rope_theta` changes `rope_parameters`.

    Args:
        build: makes a configuration from values.
        name: of the value.
        value: from the run file.
    """
    values = [value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        # The value may be the default, which changes nothing. So a second one is tried.
        values.append(2 * value + 1)
    declared = build({}).to_dict()
    others = [build({name: each}).to_dict() for each in values]
    return any(other.get(key) != declared[key] for other in others for key in declared if key != name)
