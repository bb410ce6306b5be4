"""All that survives a restart: parameters, AdamW's moments, and how many steps each moment has seen.

A frozen parameter has no moments. Data order, learning rate and dropout are functions of the step, so nothing else is
saved.
"""

from pathlib import Path

import torch
from torch import Tensor

from meshtrain.checkpoint.store import load_checkpoint
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.training.optim import ShardedAdamW


def saved_tensors(pipeline: Pipeline, optimizer: ShardedAdamW) -> dict[str, Tensor]:
    """Return what this process adds to a checkpoint, by name; the far copy of a tied weight is left out."""
    owned = pipeline.owned_parameters().items()
    return {key: value for name, tensor in owned for key, value in _state_of(name, name, tensor, optimizer).items()}


@torch.no_grad()
def load_state(checkpoint: Path, pipeline: Pipeline, optimizer: ShardedAdamW) -> None:
    """Fill parameters and moments from a checkpoint: the far copy of a tied weight gets the original. Collective.

    Raises:
        CheckpointError: the same on all processes: files are missing or broken, or they hold another model.
    """
    fqns = pipeline.canonical_names()
    wanted: dict[str, Tensor] = {}
    # A checkpoint is read by name, and a process that holds both ends of a tie would ask for one name twice.
    twins: list[tuple[Tensor, Tensor]] = []
    for name, parameter in pipeline.named_parameters():
        for key, value in _state_of(name, fqns[name], parameter, optimizer).items():
            if key in wanted:
                twins.append((value, wanted[key]))
            else:
                wanted[key] = value
    load_checkpoint(checkpoint, wanted)
    for copy, original in twins:
        local_tensor(copy).copy_(local_tensor(original))


def _state_of(name: str, fqn: str, parameter: Tensor, optimizer: ShardedAdamW) -> dict[str, Tensor]:
    if not parameter.requires_grad:
        return {f"model.{fqn}": parameter.detach()}
    moments = {f"optimizer.{moment}.{fqn}": value for moment, value in optimizer.moments(name).items()}
    return {f"model.{fqn}": parameter.detach(), f"optimizer.step.{fqn}": optimizer.steps_done(name), **moments}
