"""Whether a checkpoint is of the model that is here: what it computes does not follow from its tensors alone."""

import json
import re
from typing import Any

from transformers import PretrainedConfig

from meshtrain.checkpoint.directory import HUGGINGFACE_NAME
from meshtrain.checkpoint.location import Location, as_local, told_in_a_line
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.training.directory import differences

# What a program may change of a model without making another of it: dropout, generation, outputs, notes.
_FREE = re.compile(
    r".*drop.*|.*token_id|output_.*|use_cache|return_dict|id2label|label2id|problem_type|initializer_range|.*aux_loss.*"
    r"|router_jitter_noise|_attn_implementation|transformers_version|_name_or_path|dtype|architectures|auto_map"
)


def model_differences(manifest: Manifest, checkpoint: Location, config: PretrainedConfig) -> list[str]:
    """Say what is another model there than here.

    Args:
        manifest: of the checkpoint.
        config: of the model that is here.

    Raises:
        CheckpointError: if the configuration there cannot be read.
    """
    if problems := kind_differences(manifest, config):
        return problems
    with told_in_a_line(checkpoint), as_local(checkpoint / HUGGINGFACE_NAME) as directory:
        there = type(config).from_pretrained(directory)
    return [f"{problem}; it was saved of another model" for problem in differences(_values(there), _values(config))]


def kind_differences(manifest: Manifest, config: PretrainedConfig) -> list[str]:
    """Say whether it is of another kind of model."""
    if manifest.model_type == config.model_type:
        return []
    return [f"the model is a {manifest.model_type} there and a {config.model_type} here"]


def _values(config: PretrainedConfig) -> dict[str, Any]:
    plain = json.loads(json.dumps(config.to_dict(), default=str))
    return {f"config.{name}": value for name, value in plain.items() if not _FREE.fullmatch(name)}
