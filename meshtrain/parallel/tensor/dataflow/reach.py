"""Find out which outputs of a model's projections reach which inputs of other projections.

The model runs once with values. The output of every projection becomes the start of a new autograd
graph, so that a gradient shows what lies between two projections and nothing else.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.compat.autograd import tensors_in
from meshtrain.compat.nn import own_forward, restore_forward, set_forward
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.parallel.tensor.requirements import is_projection


@dataclass
class Call:
    """One call of a projection.

    Attributes:
        received: (..., inputs), with its graph.
        returned: (..., outputs), a leaf of the graph.
    """

    received: Tensor
    returned: Tensor


@dataclass
class Recording:
    """One forward pass of a model.

    Attributes:
        calls: name of a projection -> its calls, in the order of the first call.
        hidden: hidden states that layers received, as leaves.
        results: hidden states that the layers received, and what the model returned, with their
            graphs.
        parameters: of all modules that are no projections.
    """

    calls: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    hidden: list[Tensor] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def record(model: PreTrainedModel, inputs: dict[str, Any]) -> Recording:
    """Run a model with values, and record the calls of the projections inside its layers.

    Args:
        model: in training mode, without dropout.
        inputs: of the model.
    """
    recording = Recording()
    layers_name, layers = find_layers(model)
    projections = {f"{layers_name}.{name}": module for name, module in layers.named_modules() if is_projection(module)}
    with ExitStack() as stack:
        for name, module in projections.items():
            stack.enter_context(_replaced(module, partial(_call, recording, name)))
        for layer in layers:
            stack.enter_context(_replaced(layer, partial(_run_layer, recording)))
        output = model(**inputs, use_cache=False)
    recording.results += [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    own = {id(parameter) for module in projections.values() for parameter in module.parameters()}
    recording.parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) not in own and parameter.requires_grad
    }
    return recording


@contextmanager
def _replaced(module: nn.Module, run: Callable[..., Any]) -> Iterator[None]:
    """Let `run` compute the module while the block runs; it gets the forward from before first."""
    before = own_forward(module)
    set_forward(module, partial(run, module.forward))
    try:
        yield
    finally:
        restore_forward(module, before)


def _call(recording: Recording, name: str, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    (received,) = (*args, *kwargs.values())
    returned = forward(received.detach()).detach().requires_grad_()
    recording.calls[name].append(Call(received, returned))
    # A view, because a leaf cannot be changed in place.
    return returned.view_as(returned).clone()


def _run_layer(recording: Recording, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    first = args[0] if args else kwargs["hidden_states"]
    if first.requires_grad:
        # What else a layer returns counts where a later layer or the model uses it.
        recording.results.append(first)
    hidden = first.detach().requires_grad_()
    recording.hidden.append(hidden)
    arrived = hidden.clone()
    return forward(arrived, *args[1:], **kwargs) if args else forward(**{**kwargs, "hidden_states": arrived})


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What reaches the inputs of one projection.

    Attributes:
        inputs: number of input features.
        outputs: projection before -> (its outputs, inputs) bool: which reach which.
        parameters: parameter -> for each dimension (size, inputs) bool.
        from_hidden: whether hidden states of a layer reach it without a projection between. The
            inputs are then full, and nothing else is recorded.
    """

    inputs: int
    outputs: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, list[Tensor]] = field(default_factory=dict)
    from_hidden: bool = False


def reach_of(recording: Recording, name: str) -> Reach:
    """Return what reaches the inputs of a projection, feature by feature."""
    calls = recording.calls[name]
    width = calls[0].received.shape[-1]
    received = [call.received for call in calls if call.received.requires_grad]
    if any(gradient is not None for gradient in _gradients(received, recording.hidden)):
        return Reach(inputs=width, from_hidden=True)
    returned = [(source, call.returned) for source, calls in recording.calls.items() for call in calls]
    sources = _that_reach(received, returned)
    parameters = _that_reach(received, [*recording.parameters.items()])
    hits = _Hits(width)
    for feature in range(width):
        gradients = _gradients(received, [tensor for _, tensor in (*sources, *parameters)], feature)
        for (source, tensor), gradient in zip(sources, gradients[: len(sources)], strict=True):
            hits.add(source, tensor, -1, feature, gradient)
        for (parameter, tensor), gradient in zip(parameters, gradients[len(sources) :], strict=True):
            for dim in range(tensor.dim()):
                hits.add(parameter, tensor, dim, feature, gradient)
    return Reach(
        inputs=width,
        outputs={source: hits.of[source, -1] for source, _ in sources},
        parameters={p: [hits.of[p, dim] for dim in range(tensor.dim())] for p, tensor in parameters},
    )


class _Hits:
    """(name of a tensor, dimension) -> (size, inputs) bool: which indices reach which inputs."""

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self.of: dict[tuple[str, int], Tensor] = {}

    def add(self, name: str, tensor: Tensor, dim: int, feature: int, gradient: Tensor | None) -> None:
        """Add what a gradient of one input feature shows."""
        size = tensor.shape[dim]
        hits = self.of.setdefault((name, dim), torch.zeros(size, self.inputs, dtype=torch.bool))
        hits[:, feature] |= _hit(gradient, size, dim)


def _that_reach(received: Sequence[Tensor], named: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    gradients = _gradients(received, [tensor for _, tensor in named])
    return [pair for pair, gradient in zip(named, gradients, strict=True) if gradient is not None]


def returned_directly(recording: Recording) -> dict[str, Tensor]:
    """Return projection -> (outputs) bool: features that reach a result without a projection."""
    named = [(source, call.returned) for source, calls in recording.calls.items() for call in calls]
    gradients = _gradients(recording.results, [returned for _, returned in named])
    reached: dict[str, Tensor] = {}
    for (source, returned), gradient in zip(named, gradients, strict=True):
        reached[source] = reached.get(source, False) | _hit(gradient, returned.shape[-1])
    return reached


def _hit(gradient: Tensor | None, size: int, dim: int = -1) -> Tensor:
    """Return (size) bool: the indices along a dimension where a gradient is not 0."""
    if gradient is None:
        return torch.zeros(size, dtype=torch.bool)
    return (gradient != 0).movedim(dim, 0).reshape(size, -1).any(1)


def _gradients(
    results: Sequence[Tensor], leaves: Sequence[Tensor], feature: int | None = None
) -> Sequence[Tensor | None]:
    """Return the gradients of a random sum over the results, or over one of their features.

    None stands for a gradient that is 0 everywhere.
    """
    stream = torch.Generator().manual_seed(0)
    total = torch.zeros((), dtype=torch.float64)
    for result in results:
        part = result if feature is None else result[..., feature]
        if part.is_floating_point():
            total = total + (part * torch.randn(part.shape, generator=stream, dtype=torch.float64)).sum()
    if not total.requires_grad or not leaves:
        return [None] * len(leaves)
    gradients = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
    return [None if gradient is None or not gradient.any() else gradient for gradient in gradients]
