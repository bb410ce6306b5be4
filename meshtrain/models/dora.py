"""DoRA: an adapter that also learns the length of each row of a projection's weight.

The weight becomes m / n * (W + B A * scaling), where n are the lengths of the rows of the second
factor, and m, the magnitudes, train. Gradients do not pass through n.

Source: Weight-Decomposed Low-Rank Adaptation, Liu et al. (arXiv:2402.09353), section 4.3 for n.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from meshtrain.models.fused import FusedParameter, UnfusedProjection
from meshtrain.models.layout import local_indices, local_tensor

KIND = "lora_magnitude_vector"
"""What peft calls the magnitudes."""


class Magnitude(nn.Module):
    """The magnitudes of a part of a fused projection.

    Args:
        values: (outputs).
    """

    def __init__(self, values: nn.Parameter) -> None:
        super().__init__()
        self.weight = values


def magnitudes_of(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the name of each adapter of a layer that has magnitudes, and the module with these."""
    modules = getattr(layer, KIND)
    assert isinstance(modules, nn.ModuleDict)
    return list(modules.items())


def parts_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the parts of a projection, of B or of magnitudes by name.

    What is whole is one part, without a name.
    """
    return list(module.named_children()) if isinstance(module, UnfusedProjection | nn.ModuleDict) else [("", module)]


def split_magnitudes(layer: nn.Module, name: str, widths: Mapping[str, int]) -> list[FusedParameter]:
    """Split the magnitudes of a fused projection's layer into parts, in place.

    Args:
        layer: taken off the model.
        name: FQN of the projection.
        widths: part -> number of its outputs.

    Returns:
        One entry for each adapter with magnitudes.
    """
    entries, sizes = [], tuple(widths.values())
    for adapter, module in magnitudes_of(layer):
        whole = module.get_parameter("weight")
        pieces = [nn.Parameter(it.clone(), requires_grad=whole.requires_grad) for it in whole.detach().split(sizes)]
        parts = {part: Magnitude(piece) for part, piece in zip(widths, pieces, strict=True)}
        getattr(layer, KIND)[adapter] = nn.ModuleDict(parts)
        prefix = f"{name}.{KIND}.{adapter}"
        names = tuple(f"{prefix}.{part}.weight" for part in widths)
        entries.append(FusedParameter(f"{prefix}.weight", names, 0, sizes if len({*sizes}) > 1 else ()))
    return entries


@torch.no_grad()
def initialize_magnitudes(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Fill magnitudes with the lengths of the rows of the weights. Collective.

    Every weight is gathered in full, one after the other, so that the values are the same on every
    mesh.

    Args:
        model: with values.
        layers: taken off it.
    """
    for name, layer in layers.items():
        for _, module in magnitudes_of(layer):
            for (_, mine), (_, base) in zip(parts_of(module), parts_of(model.get_submodule(name)), strict=True):
                lengths = _row_lengths(base)
                parameter = mine.get_parameter("weight")
                (indices,) = local_indices(parameter)
                local_tensor(parameter).copy_(lengths[indices.to(lengths.device)])


def _row_lengths(projection: nn.Module) -> Tensor:
    weight: Tensor = projection.get_parameter("weight").detach()
    full = weight.full_tensor() if isinstance(weight, DTensor) else weight
    # In float64 the result does not depend on the order of the sum, once it is rounded.
    return torch.linalg.vector_norm(full, dim=0 if isinstance(projection, Conv1D) else 1, dtype=torch.float64)
