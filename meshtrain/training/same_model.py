"""Check that a checkpoint belongs to the model of this program.

What a model computes does not follow from its tensors alone, so configurations are compared.
"""

import json
import re
from typing import Any

from transformers import PretrainedConfig

from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.storage.directory import HUGGINGFACE_NAME
from meshtrain.checkpoint.storage.location import errors_in_one_line, local_path
from meshtrain.compat.transformers import PATH_KEY
from meshtrain.errors import CheckpointError, Problem
from meshtrain.models.whole.causal_class import WHOLE_KEY, is_half
from meshtrain.runtime.agreement import failing_together, raise_together
from meshtrain.runtime.location import Location
from meshtrain.training.directory import differences

PLACES = "in the checkpoint", "in this program"
# Values of a Hugging Face configuration that do not determine what the model computes.
_VOLATILE = ("transformers_version", PATH_KEY, "dtype", "architectures")
# Values that a program may change in a model: dropout, generation, outputs, notes.
_FREE = re.compile(
    r".*drop.*|.*token_id|output_.*|use_cache|return_dict|id2label|label2id|problem_type|initializer_range|.*aux_loss.*"
    r"|router_jitter_noise|auto_map"
)


def check_same_kind(checkpoint: Location, manifest: Manifest, config: PretrainedConfig) -> None:
    """Check that a checkpoint has the same kind of model as this program. Collective.

    Raises:
        CheckpointError: on all processes alike, if it has another kind.
    """
    advice = f"meshtrain.build_model({str(checkpoint)!r}) builds its model"
    found = kind_differences(manifest, config, PLACES)
    raise_together((Problem(one, advice, about=str(checkpoint)) for one in found), CheckpointError)


def check_same_model(checkpoint: Location, manifest: Manifest, config: PretrainedConfig) -> None:
    """Check that a checkpoint has the same model as this program, by its configuration. Collective.

    Raises:
        CheckpointError: on all processes alike, if it has another model, or if its configuration
            cannot be read.
    """
    check_same_kind(checkpoint, manifest, config)
    with failing_together(CheckpointError):
        with errors_in_one_line(checkpoint), local_path(checkpoint / HUGGINGFACE_NAME) as directory:
            there = type(config).from_pretrained(directory)
        sides = [
            {f"config.{name}": value for name, value in config_values(side).items() if not _FREE.fullmatch(name)}
            for side in (there, config)
        ]
        advice = "build the model as it was, or load the weights alone with meshtrain.load_weights"
        if found := differences(sides[0], sides[1], PLACES):
            raise CheckpointError(Problem(difference, advice, about=str(checkpoint)) for difference in found)


def kind_differences(manifest: Manifest, config: PretrainedConfig, places: tuple[str, str]) -> list[str]:
    """Return a line if a checkpoint has another kind of model; otherwise an empty list.

    Args:
        places: what the line calls the checkpoint, and the user of `config`.
    """
    if manifest.model_type == config.model_type:
        return []
    return [f"the model is a {manifest.model_type} {places[0]} and a {config.model_type} {places[1]}"]


def config_values(config: PretrainedConfig) -> dict[str, Any]:
    """Return the values of a configuration that describe a model, as if read from a file."""
    values = {name: value for name, value in config.to_dict().items() if name not in _VOLATILE}
    if is_half(config):
        # The folder of the whole model may have moved, but not changed.
        values[WHOLE_KEY] = getattr(config, WHOLE_KEY)["files"]
    # One of the two sides was read from JSON, which has string keys and no tuples.
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain
