"""Complete gradients after every backward pass of a program, however the program starts it."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.compat.autograd import number_of_backward_pass, tensors_in, when_backward_ends
from meshtrain.errors import ModelError
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.shard import abandon_backward, fsdp_modules
from meshtrain.training.gradients import complete_gradients

NO_BACKWARD_PASS = -1


class GradientCompletion:
    """Completes the gradients of each backward pass of a model without a pipeline.

    What FSDP2 does not reduce is reduced here: copies of the model over dp_replicate, and parts
    over tp. A program may run several backward passes before it takes a step, so only the gradients
    of the current pass may be summed. Earlier gradients are therefore set aside as soon as the pass
    reaches the output of the model or one of these parameters. The weight of the head is reached
    first where a program computes its loss with it from hidden states.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._earlier: dict[nn.Parameter, Tensor] = {}
        self._running: int | None = None
        self._watched: set[nn.Parameter] = set()
        self._reached: set[nn.Parameter] = set()
        self._watch_parameters()

    def watch(self, output: Any) -> None:
        """Detect when the backward pass of this forward pass begins."""
        # At every pass, because parameters may be frozen and unfrozen between passes.
        self._watch_parameters()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._begin)

    def _watch_parameters(self) -> None:
        for parameter in _summed_parameters(self._pipeline):
            if parameter not in self._watched:
                self._watched.add(parameter)
                parameter.register_hook(partial(self._reach, parameter))

    def recover(self) -> None:
        """Remove what a backward pass that raised an exception has left, before a forward pass."""
        if self._running is None or number_of_backward_pass() != NO_BACKWARD_PASS:
            return
        self._forget()
        self._pipeline.replicas.abandon_step()
        for stage in self._pipeline.stages:
            abandon_backward(stage.model)

    def _begin(self, _: Tensor) -> None:
        number = number_of_backward_pass()
        if self._running == number:
            return
        if self._running is not None:
            raise ModelError(
                "an earlier backward pass of this model has ended with an exception, so some gradients are those of "
                "this rank alone",
                "call optimizer.zero_grad(), and then the model, before the next backward pass",
            )
        # Gradients are enabled during a backward pass only with `create_graph`.
        if torch.is_grad_enabled() and any(fsdp_modules(stage.model) for stage in self._pipeline.stages):
            raise ModelError(
                "create_graph = True: gradients of gradients do not pass through parameters that FSDP2 has gathered",
                "use a mesh with dp_shard = 1, without offload and with one number format",
            )
        self._running = number
        self._earlier = set_gradients_aside(self._pipeline)
        self._pipeline.replicas.begin_step(1)
        when_backward_ends(self._finish)

    def _reach(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        # Recomputation of activations runs backward passes inside this one.
        if self._running is None:
            self._begin(gradient)
        self._reached.add(parameter)

    def _finish(self) -> None:
        earlier = self._earlier
        lost = [name for name, parameter in self._pipeline.named_parameters() if self._is_lost(parameter)]
        self._forget()
        if not lost:
            complete_gradients(self._pipeline)
        add_gradients(earlier)
        if lost:
            raise ModelError(
                f"the gradient of {lost[0]} was read before it was summed over all ranks, by torch.autograd.grad or "
                "by a hook of the parameter",
                "call loss.backward(), and read parameter.grad when it is done",
            )

    def _is_lost(self, parameter: nn.Parameter) -> bool:
        return parameter in self._reached and parameter.grad is None

    def _forget(self) -> None:
        self._running = None
        self._earlier = {}
        self._reached.clear()


def set_gradients_aside(pipeline: Pipeline) -> dict[nn.Parameter, Tensor]:
    """Remove and return the gradients of parameters that are summed over processes."""
    earlier = {}
    for parameter in _summed_parameters(pipeline):
        if parameter.grad is not None:
            earlier[parameter] = parameter.grad
            parameter.grad = None
    return earlier


def _summed_parameters(pipeline: Pipeline) -> Iterator[nn.Parameter]:
    ties = {*pipeline.tied_copies.parameters()}
    for name, parameter in pipeline.trainable_parameters():
        if pipeline.replicas.is_needed or name in pipeline.summed_over_tp or parameter in ties:
            yield parameter


@torch.no_grad()
def add_gradients(earlier: dict[nn.Parameter, Tensor]) -> None:
    """Add gradients to those that the parameters have."""
    for parameter, gradient in earlier.items():
        parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
