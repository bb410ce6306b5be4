"""All that survives a restart: parameters, AdamW's moments, and how many steps each moment has seen.

A frozen parameter has no moments. Data order, learning rate and dropout are functions of the step, so nothing else is
saved.
"""

from torch import Tensor

from meshtrain.parallel.pipeline import Pipeline
from meshtrain.training.optim import ShardedAdamW


def saved_tensors(pipeline: Pipeline, optimizer: ShardedAdamW) -> dict[str, Tensor]:
    """Return what this process adds to a checkpoint, by name; the far copy of a tied weight is left out."""
    owned = pipeline.owned_parameters().items()
    return {key: value for name, tensor in owned for key, value in _state_of(name, name, tensor, optimizer).items()}


def wanted_tensors(pipeline: Pipeline, optimizer: ShardedAdamW) -> dict[str, Tensor]:
    """Return what this process fills from a checkpoint: the far copy of a tied weight asks for the original."""
    fqns = pipeline.canonical_names()
    held = pipeline.named_parameters()
    return {
        key: value for name, tensor in held for key, value in _state_of(name, fqns[name], tensor, optimizer).items()
    }


def _state_of(name: str, fqn: str, parameter: Tensor, optimizer: ShardedAdamW) -> dict[str, Tensor]:
    if not parameter.requires_grad:
        return {f"model.{fqn}": parameter.detach()}
    moments = {f"optimizer.{moment}.{fqn}": value for moment, value in optimizer.moments(name).items()}
    return {f"model.{fqn}": parameter.detach(), f"optimizer.step.{fqn}": optimizer.steps_done(name), **moments}
