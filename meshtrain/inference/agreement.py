"""Let the processes that hold one model generate one text: equal arguments, equal draws."""

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import GenerationConfig

from meshtrain.config.mesh import MODEL_AXES
from meshtrain.errors import UserError, name_some
from meshtrain.runtime.agreement import gather_objects
from meshtrain.runtime.digest import tensor_digest
from meshtrain.runtime.mesh import axis_size


def agree(mesh: DeviceMesh, given: Mapping[str, Any], device: torch.device) -> None:
    """Check that the processes of one model got the same arguments, and let them draw alike.

    All of them take over the random state of the first. Collective.

    Args:
        mesh: all processes; those that differ on dp axes only may have other texts.
        given: name -> argument of `generate`.
        device: the device on which the model computes.

    Raises:
        UserError: on all processes of the model, if their arguments differ.
    """
    answers = [(dist.get_rank(), {name: _digest(value) for name, value in given.items()}, _random_states(device))]
    for axis in MODEL_AXES:
        if axis_size(mesh, axis) > 1:
            answers = [found for answer in gather_objects(answers, mesh.get_group(axis)) for found in answer]
    first, wanted, states = answers[0]
    others = [rank for rank, digests, _ in answers if digests != wanted]
    if others:
        different = {
            name
            for _, digests, _ in answers
            for name in digests.keys() | wanted.keys()
            if digests.get(name) != wanted.get(name)
        }
        raise UserError(
            f"generate: rank {first} and rank {name_some([*map(str, others)])} hold one model together, but received "
            f"different {name_some(sorted(different))}; pass the same to all of them"
        )
    _restore_random(states)


def _digest(value: Any) -> str:
    if isinstance(value, Tensor):
        return tensor_digest(value)
    if isinstance(value, GenerationConfig):
        return value.to_json_string(use_diff=False)
    try:
        return json.dumps(value)
    except TypeError:
        # Objects of one class may still differ: the callbacks of transformers cannot be compared.
        return type(value).__name__


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore_random(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
