"""All that survives a restart: parameters, AdamW's moments, and the number of steps done.

Data order, learning rate and dropout are functions of the step, so nothing else is saved.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshtrain.parallel.pipeline import Pipeline

MOMENTS = ("exp_avg", "exp_avg_sq")


def saved_tensors(pipeline: Pipeline, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return what this process adds to a checkpoint, by name; the far copy of a tied weight is left out."""
    return dict(_named_tensors(pipeline.owned_parameters().items(), optimizer))


def wanted_tensors(pipeline: Pipeline, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return what this process fills from a checkpoint: the far copy of a tied weight asks for the original."""
    canonical = pipeline.canonical_names()
    return dict(_named_tensors(((canonical[name], value) for name, value in pipeline.named_parameters()), optimizer))


def set_steps_done(optimizer: Optimizer, steps: int) -> None:
    """Tell AdamW how many steps its moments have seen."""
    for state in optimizer.state.values():
        state["step"].fill_(float(steps))


def _named_tensors(
    parameters: Iterable[tuple[str, nn.Parameter]], optimizer: Optimizer
) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in parameters:
        state = _state_of(parameter, optimizer)
        yield f"model.{name}", parameter.detach()
        for moment in MOMENTS:
            yield f"optimizer.{moment}.{name}", state[moment]


def _state_of(parameter: nn.Parameter, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return AdamW's state of a parameter; what it would make at its first step, if there was none."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
    return state
