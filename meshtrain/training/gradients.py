"""Complete the gradients of each process, and compute a norm that is the same on every process.

Whether a gradient must be summed over an axis follows from its placement, not from a named layout.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from meshtrain.compat.operators import multiply, norms
from meshtrain.config.mesh import AXES, PP, STAGE_AXES, TP, axes_named
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.replicas import all_reduce_small, local_gradient
from meshtrain.runtime.mesh import all_reduce_over, axis_size


@torch.no_grad()
def fill_gradients(pipeline: Pipeline) -> set[str]:
    """Set missing gradients of trainable parameters to zero, so that all processes reduce alike.

    Returns:
        The names of the parameters for which no sample of this process gave a gradient.
    """
    filled = set()
    for name, parameter in pipeline.trainable_parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            filled.add(name)
    for stage in pipeline.stages:
        if stage.filled:
            filled |= {name for name, parameter in stage.named_parameters() if parameter in stage.filled}
            stage.filled.clear()
    return filled


def forget_unused(pipeline: Pipeline, filled: set[str]) -> tuple[str, ...]:
    """Remove the gradients that every process has filled in. Collective.

    AdamW then leaves these parameters unchanged, as it does in one process. With zeros it would
    still decay them and their moments.

    Args:
        filled: the result of `fill_gradients`.

    Returns:
        The names of these parameters.
    """
    parameters = dict(pipeline.trainable_parameters())
    device = gradient_device(pipeline)
    flags = torch.tensor([name not in filled for name in parameters], dtype=torch.float32, device=device)
    used = dict(zip(parameters, all_reduce_over(flags, pipeline.mesh, STAGE_AXES), strict=True))
    names = {id(parameter): name for name, parameter in parameters.items()}
    pipeline.tied_copies.add_up(lambda parameter: used[names[id(parameter)]])
    unused = tuple(name for name, flag in used.items() if not flag)
    for name in unused:
        parameters[name].grad = None
    return unused


def complete_gradients(pipeline: Pipeline) -> None:
    """Complete the gradients of a backward pass, for a program with its own loop. Collective."""
    filled = fill_gradients(pipeline)
    finish_gradients(pipeline)
    device = next(pipeline.named_parameters())[1].device
    # Usually no process has filled in a gradient, and the exchange of names is not needed.
    if all_reduce_over(torch.tensor(float(len(filled)), device=device), pipeline.mesh, AXES).item():
        forget_unused(pipeline, filled)


def finish_gradients(pipeline: Pipeline) -> None:
    """Sum gradients over the processes that the backward pass did not sum over.

    These are sums over the copies of the model, over tp parts and over tied copies.
    """
    pipeline.replicas.reduce_gradients()
    trained = dict(pipeline.trainable_parameters())
    if pipeline.summed_over_tp:
        partial = [parameter for name, parameter in trained.items() if name in pipeline.summed_over_tp]
        all_reduce_small([local_gradient(parameter) for parameter in partial], pipeline.mesh.get_group(TP))
    pipeline.tied_copies.reduce_gradients()
    for name, parameter in trained.items():
        gradient = parameter.grad
        assert gradient is not None, f"{name} has no gradient"
        assert not isinstance(parameter, DTensor) or gradient.placements == parameter.placements, (  # type: ignore[attr-defined]
            f"the gradient of {name} is laid out as {gradient.placements}, the parameter as {parameter.placements}"  # type: ignore[attr-defined]
        )


@torch.no_grad()
def gradient_norm(pipeline: Pipeline, *further: Tensor) -> tuple[Tensor, ...]:
    """Return the gradient norm of the full model, in which a tied weight counts once.

    Args:
        further: () float64 tensors that are summed over the pp axis in the same reduction.

    Returns:
        The () float64 norm, and the sums of `further`; the same on every process.
    """
    mesh, device = pipeline.mesh, gradient_device(pipeline)
    total = _over_stage(pipeline, _squares_by_axes(pipeline.owned_parameters().values())).unsqueeze(0)
    if further:
        # They are stacked, so that there is only one copy if gradients are stored in host memory.
        total = torch.cat([total, torch.stack(further).to(device, torch.float64)])
    total = all_reduce_over(total, mesh, [PP])
    return total[0].sqrt(), *total[1:]


@dataclass(frozen=True)
class LayerNorms:
    """The gradient norms of layers, and of modules outside of layers.

    Attributes:
        names: of the layers and modules, in the order of their norms; none: nothing is measured.
    """

    names: tuple[str, ...] = ()

    @torch.no_grad()
    def of(self, pipeline: Pipeline) -> tuple[Tensor, ...]:
        """Return the norms (names,), float64, the same on every process. Collective."""
        if not self.names:
            return ()
        places = {name: place for place, name in enumerate(self.names)}
        device, groups = gradient_device(pipeline), defaultdict[frozenset[str], list[tuple[int, Tensor]]](list)
        for fqn, parameter in pipeline.owned_parameters().items():
            if parameter.requires_grad:
                # This includes parameters without a gradient: the processes must agree on the sets.
                found = groups[_sharded_axes(parameter)]
                if parameter.grad is not None:
                    found.append((places[layer_of(fqn)], local_tensor(parameter.grad)))
        squares = {}
        for axes, found in groups.items():
            squares[axes] = torch.zeros(len(places), dtype=torch.float64, device=device)
            if found:
                values = _squares([it for _, it in found])
                squares[axes].index_add_(0, torch.tensor([place for place, _ in found], device=device), values)
        own = _over_stage(pipeline, squares) + torch.zeros(len(places), dtype=torch.float64, device=device)
        return (all_reduce_over(own, pipeline.mesh, [PP]).sqrt(),)


NO_LAYERS = LayerNorms()


def layer_of(fqn: str) -> str:
    """Return the name of the layer of a parameter, or of its module if it is outside of layers."""
    parts = fqn.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: number + 1])


def layers_of(pipeline: Pipeline) -> LayerNorms:
    """Return the layers and modules of a full model whose gradient norms are measured."""
    found = {layer_of(fqn) for fqn in pipeline.parameter_names}
    return LayerNorms(tuple(sorted(found, key=_natural)))


def _natural(name: str) -> list[str]:
    """Return a key that sorts layers by their numbers."""
    return [part.zfill(9) if part.isdigit() else part for part in name.split(".")]


@torch.no_grad()
def scale_gradients(
    parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float, *, loss_scale: float = 1.0
) -> None:
    """Divide gradients by the loss scale, and scale them down to a norm of at most `max_norm`.

    Args:
        norm: () norm of the gradients, without the loss scale.
    """
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) / loss_scale
    for gradients in _by_dtype(parameters).values():
        multiply(gradients, factor.to(gradients[0].dtype))


def gradient_device(pipeline: Pipeline) -> torch.device:
    """Return the device on which parameters, and so gradients, are stored between uses."""
    return next(parameter.device for _, parameter in pipeline.named_parameters())


def _over_stage(pipeline: Pipeline, squares: dict[frozenset[str], Tensor]) -> Tensor:
    """Return the sum over the processes of a stage of squares, which are sharded over axes."""
    mesh = pipeline.mesh
    for axis in STAGE_AXES:
        sharded = [axes for axes in sorted(squares, key=sorted) if axis in axes]
        if sharded and axis_size(mesh, axis) > 1:
            sums = all_reduce_over(torch.stack([squares[axes] for axes in sharded]), mesh, [axis])
            squares.update(zip(sharded, sums, strict=True))
    # A process whose stages are frozen has no gradient, and adds zero.
    return sum(squares.values(), torch.zeros((), dtype=torch.float64, device=gradient_device(pipeline)))


def _squares_by_axes(parameters: Iterable[nn.Parameter]) -> dict[frozenset[str], Tensor]:
    """Return set of axes -> this process's sum of squares of the gradients sharded over them."""
    groups: dict[frozenset[str], list[Tensor]] = defaultdict(list)
    device = None
    for parameter in parameters:
        device = parameter.device
        if parameter.requires_grad:
            # This includes parameters without a gradient: the processes must agree on the sets.
            found = groups[_sharded_axes(parameter)]
            if parameter.grad is not None:
                found.append(local_tensor(parameter.grad))
    return {axes: _sum_of_squares(gradients, device) for axes, gradients in groups.items()}


def _sharded_axes(parameter: Tensor) -> frozenset[str]:
    if not isinstance(parameter, DTensor):
        return frozenset()
    names = parameter.device_mesh.mesh_dim_names
    assert names is not None
    return _axes_of_shards(names, tuple(parameter.placements))


@cache
def _axes_of_shards(names: tuple[str, ...], placements: tuple[Placement, ...]) -> frozenset[str]:
    # `is_shard()` is not used: it silently returns False for FSDP2's _StridedShard over tp.
    sharded = [name for name, placement in zip(names, placements, strict=True) if not placement.is_replicate()]
    found = frozenset(axis for name in sharded for axis in axes_named(name))
    assert found <= set(AXES)
    return found


def _sum_of_squares(gradients: Sequence[Tensor], device: torch.device | None) -> Tensor:
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return _squares(gradients).sum()


def _squares(gradients: Sequence[Tensor]) -> Tensor:
    """Return the square of the norm of each gradient (gradients,), float64."""
    return torch.stack(norms(gradients)).double().square()


def _by_dtype(parameters: Iterable[nn.Parameter]) -> dict[torch.dtype, list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            groups[parameter.grad.dtype].append(local_tensor(parameter.grad))
    return groups
