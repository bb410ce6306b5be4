"""DoRA on projections that are in parts or sharded over tp.

The lengths of the rows of W + B A need whole rows. A column-wise projection has them: its shard of
the magnitudes is that of its outputs. A row-wise one has a part of each row, so the sums of squares
are added over tp, one number for each output.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.pytorch_utils import Conv1D

from meshtrain.models.dora import KIND, magnitudes_of, parts_of
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.tensor.modules import OwnOutputs, ShardedConv1D, ShardedLinear, rows_of
from meshtrain.parallel.transposable import sum_over


def apply_dora(model: nn.Module, layers: Mapping[str, nn.Module], group: ProcessGroup | None) -> list[nn.Module]:
    """Let layers with magnitudes compute with them, in place.

    Args:
        model: of a stage, with its own modules sharded.
        layers: taken off it, and sharded.
        group: the processes of tp; None: tp is 1.

    Returns:
        The projections, or their parts, of whose weights it needs all digits.
    """
    own: Mapping[str, Any] = layers
    bases: list[nn.Module] = []
    for name, layer in own.items():
        for adapter, _ in magnitudes_of(layer):
            # peft's layers call the variant of an adapter, if it has one.
            layer.lora_variant[adapter] = Dora(model.get_submodule(name), group)
            bases += [part for _, part in parts_of(model.get_submodule(name))]
    return bases


def shard_magnitudes(layer: nn.Module, is_sharded: Sequence[bool], mesh: DeviceMesh, *, is_partial: bool) -> list[str]:
    """Shard the magnitudes of a layer like the outputs of its base, in place.

    Args:
        layer: taken off the model.
        is_sharded: for each part of the base, whether its outputs are sharded.
        mesh: the 1-D tp mesh.
        is_partial: whether the gradients of magnitudes that are not sharded are partial over tp.

    Returns:
        The names of the parameters whose gradients are partial over tp.
    """
    names = []
    for adapter, module in magnitudes_of(layer):
        for (kind, mine), cut in zip(parts_of(module), is_sharded, strict=True):
            values = mine.get_parameter("weight")
            if cut:
                shards = distribute_tensor(values.detach(), mesh, [Shard(0)], src_data_rank=None)
                mine.register_parameter("weight", nn.Parameter(shards, requires_grad=values.requires_grad))
            elif is_partial:
                names.append(".".join(it for it in (KIND, adapter, kind, "weight") if it))
    return names


class Dora:
    """Computes m / n * (W x + B A x * scaling) + bias from the output of the base, W x + bias.

    Args:
        base: the projection, or its parts.
        group: the processes of tp; None: tp is 1.
    """

    def __init__(self, base: nn.Module, group: ProcessGroup | None) -> None:
        self._bases, self._group = [part for _, part in parts_of(base)], group

    def forward(self, layer: Any, *, active_adapter: str, x: Tensor, result: Tensor, **kwargs: object) -> Tensor:
        """Return the output of a layer.

        Args:
            layer: peft's, with its base.
            active_adapter: name of the adapter.
            x: input of the base.
            result: output of the base.
            kwargs: for variants of peft.
        """
        down, up = layer.lora_A[active_adapter], layer.lora_B[active_adapter]
        scaling = layer.scaling[active_adapter]
        ups, magnitudes = parts_of(up), parts_of(getattr(layer, KIND)[active_adapter])
        factor = torch.cat(
            [
                self._factor(base, local_tensor(down.weight), part, magnitude, scaling, x.dtype)
                for base, (_, part), (_, magnitude) in zip(self._bases, ups, magnitudes, strict=True)
            ]
        )
        biases = [bias for base in self._bases if (bias := _bias(base)) is not None]
        plain = result - torch.cat(biases) if biases else result
        return result + (factor - 1) * plain + factor * up(down(x)) * scaling

    def _factor(self, base: Any, down: Tensor, up: Any, magnitude: Any, scaling: float, dtype: torch.dtype) -> Tensor:
        """Return m / n of this process's outputs of a part of the base."""
        rows, weight = local_tensor(up.weight), local_tensor(base.weight)
        weight = weight.T if isinstance(base, Conv1D) else weight
        values = local_tensor(magnitude.weight)
        if isinstance(base, OwnOutputs):
            rows, weight, values = (rows_of(it, base.outputs) for it in (rows, weight, values))
        with torch.no_grad():
            squares = (weight.to(dtype) + scaling * (rows @ down).to(dtype)).square().sum(dim=1)
            if _is_rowwise(base):
                assert self._group is not None
                squares = sum_over(squares, self._group)
            lengths = squares.sqrt()
        return _left(base, values / lengths)


def _bias(base: Any) -> Tensor | None:
    """Return the bias in the outputs of a part of the base."""
    if base.bias is None:
        return None
    bias = local_tensor(base.bias)
    return rows_of(bias, base.outputs) if isinstance(base, OwnOutputs) else _left(base, bias)


def _left(base: Any, values: Tensor) -> Tensor:
    """Return values of the outputs in the order and number in which they leave the base."""
    is_columnwise = isinstance(base, ShardedLinear | ShardedConv1D) and base.is_columnwise
    left: Tensor = base.leave(values) if is_columnwise else values
    return left


def _is_rowwise(base: Any) -> bool:
    return isinstance(base, ShardedLinear | ShardedConv1D) and base.bias_is_full
