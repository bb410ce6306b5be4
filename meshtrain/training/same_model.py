"""Whether a checkpoint is of the model that is here: what it computes does not follow from its tensors alone."""

import json
import re
from typing import Any

from transformers import PretrainedConfig

from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.storage.directory import HUGGINGFACE_NAME
from meshtrain.checkpoint.storage.location import Location, as_local, told_in_a_line
from meshtrain.compat.transformers import PATH_KEY
from meshtrain.errors import CheckpointError, Problem
from meshtrain.runtime.agreement import failing_together, raise_together
from meshtrain.training.directory import differences

# Values of a Hugging Face configuration that say nothing about what the model computes.
_VOLATILE = ("transformers_version", PATH_KEY, "dtype", "architectures")
# What a program may change of a model without making another of it: dropout, generation, outputs, notes.
_FREE = re.compile(
    r".*drop.*|.*token_id|output_.*|use_cache|return_dict|id2label|label2id|problem_type|initializer_range|.*aux_loss.*"
    r"|router_jitter_noise|auto_map"
)


def check_same_kind(checkpoint: Location, manifest: Manifest, config: PretrainedConfig) -> None:
    """Check that a checkpoint is of the kind of model that is here. Collective.

    Raises:
        CheckpointError: on all processes alike, if it is of another.
    """
    advice = f"meshtrain.build_model({str(checkpoint)!r}) builds the model that it is of"
    raise_together(
        [f"{checkpoint}: {found}; {advice}" for found in kind_differences(manifest, config)], CheckpointError
    )


def check_same_model(checkpoint: Location, manifest: Manifest, config: PretrainedConfig) -> None:
    """Check that a checkpoint is of the model that is here, as far as its configuration tells. Collective.

    Raises:
        CheckpointError: on all processes alike, if it is of another, or its configuration cannot be read.
    """
    check_same_kind(checkpoint, manifest, config)
    with failing_together(CheckpointError):
        with told_in_a_line(checkpoint), as_local(checkpoint / HUGGINGFACE_NAME) as directory:
            there = type(config).from_pretrained(directory)
        sides = [
            {f"config.{name}": value for name, value in config_values(side).items() if not _FREE.fullmatch(name)}
            for side in (there, config)
        ]
        advice = "build the model as it was, or take the weights alone with meshtrain.load_weights"
        if found := differences(*sides):
            raise CheckpointError(Problem(difference, advice, about=str(checkpoint)) for difference in found)


def kind_differences(manifest: Manifest, config: PretrainedConfig) -> list[str]:
    """Say whether a checkpoint is of another kind of model."""
    if manifest.model_type == config.model_type:
        return []
    return [f"the model is a {manifest.model_type} there and a {config.model_type} here"]


def config_values(config: PretrainedConfig) -> dict[str, Any]:
    """Return what a configuration says of a model, as it is when it has been read from a file."""
    values = {name: value for name, value in config.to_dict().items() if name not in _VOLATILE}
    # Through JSON, as one of two sides has gone: its keys are strings, and it has no tuples.
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain
