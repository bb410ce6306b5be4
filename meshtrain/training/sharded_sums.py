"""Sums over the dimensions of parameters whose parts lie on the processes of a stage."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshtrain.compat.dtensor import split_dim
from meshtrain.config.mesh import STAGE_AXES, axes_named
from meshtrain.runtime.mesh import all_reduce_over, axis_size


class PartialSum(NamedTuple):
    """A sum over the part of a parameter on this process.

    Attributes:
        parameter: the local part that an optimizer has.
        value: the sum, over one dimension or over all.
        dim: the dimension that is summed over; None: all.
    """

    parameter: Tensor
    value: Tensor
    dim: int | None


class ShardedSums:
    """Completes sums over parameters, on the processes of a stage together.

    Args:
        parameters: the local part that an optimizer has -> the model's parameter.
        mesh: all processes; None: this one is alone.
    """

    def __init__(self, parameters: Mapping[Tensor, Tensor], mesh: DeviceMesh | None) -> None:
        self._mesh = mesh
        self._split_axes = [] if mesh is None else [axis for axis in STAGE_AXES if axis_size(mesh, axis) > 1]
        self._shapes = {local: full.shape for local, full in parameters.items()}
        self._axes = {local: _axes_by_dim(full) for local, full in parameters.items()}

    def shape(self, parameter: Tensor) -> torch.Size:
        """Return the shape of the full parameter."""
        return self._shapes[parameter]

    def complete(self, partial: Sequence[PartialSum]) -> list[Tensor]:
        """Return the sums over full parameters. Collective over the stage, one message for an axis.

        Args:
            partial: the same sums, in the same order, on all processes of a stage.
        """
        values = [it.value for it in partial]
        for axis in self._split_axes:
            split = [place for place, it in enumerate(partial) if axis in self._axes_of(it)]
            if split:
                assert self._mesh is not None
                joined = torch.cat([values[place].reshape(-1) for place in split])
                parts = all_reduce_over(joined, self._mesh, [axis]).split([values[place].numel() for place in split])
                for place, part in zip(split, parts, strict=True):
                    values[place] = part.view(values[place].shape).to(values[place].dtype)
        return values

    def _axes_of(self, partial: PartialSum) -> frozenset[str]:
        by_dim = self._axes[partial.parameter]
        return frozenset().union(*by_dim) if partial.dim is None else by_dim[partial.dim]


def _axes_by_dim(parameter: Tensor) -> list[frozenset[str]]:
    """Return, for each dimension of a parameter, the mesh axes that split it."""
    if not isinstance(parameter, DTensor):
        return [frozenset()] * parameter.dim()
    names = parameter.device_mesh.mesh_dim_names
    assert names is not None
    found: list[frozenset[str]] = [frozenset()] * parameter.dim()
    for name, placement in zip(names, parameter.placements, strict=True):
        dim = split_dim(placement)
        if dim is not None:
            found[dim] |= frozenset(axes_named(name))
    return found
