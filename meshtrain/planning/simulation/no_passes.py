"""A pipeline that gives its parameters gradients without any pass, and can do without some."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.config.schedules import SCHEDULES
from meshtrain.parallel.pipeline import LossFunction, Pipeline


def without_passes(pipeline: Pipeline) -> Pipeline:
    """Return the same pipeline, with one backward pass that only fills in gradients."""
    return _WithoutPasses(**{field.name: getattr(pipeline, field.name) for field in fields(pipeline)})


def leave_out_layer(pipeline: Pipeline, stage: int, layer: int) -> None:
    """Leave a layer out of a pipeline in place, which can then run no passes.

    Args:
        pipeline: of a process.
        stage: index of the stage that holds the layer.
        layer: counted from the first one of the stage.
    """
    holder = next(it for it in pipeline.stages if it.index == stage)
    index = holder.first_layer + layer
    # What sums gradients has lists of its own of the parameters that train.
    holder.layers[index].requires_grad_(requires_grad=False)
    pipeline.expert_use.forget(holder.layers[index])
    holder.layers[index] = nn.Identity()


@dataclass(frozen=True)
class _WithoutPasses(Pipeline):
    def prepare(self, labels: Tensor) -> None:
        """Build nothing: there is no schedule."""

    def forward_backward(
        self, batch: Mapping[str, Tensor], loss_function: LossFunction, *, loss_scale: float = 1.0
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=batch["labels"].device)
        self.activity.enter("backward", self.stages[0].index, 0)
        self.replicas.begin_step(1)
        parameters = [parameter for _, parameter in self.trainable_parameters()]
        if self.replicas.is_needed and not SCHEDULES[self.plan.pipeline.schedule].splits_backward:
            # The hooks of the parameters send large gradients during the backward pass.
            _ZeroGradients.apply(*parameters).backward()  # type: ignore[no-untyped-call]
        else:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        return total


class _ZeroGradients(torch.autograd.Function):
    """Returns a number whose backward pass gives all inputs zero gradients."""

    @staticmethod
    def forward(ctx: Any, *parameters: nn.Parameter) -> Tensor:
        ctx.parameters = parameters
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(parameter) for parameter in ctx.parameters)
