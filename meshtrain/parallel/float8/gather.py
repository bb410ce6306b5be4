"""Weights that FSDP2 gathers in float8, half the bytes of bfloat16.

The product casts the full weight to float8, with one scale. So each process may cast its part
before it is sent, with the scale of the full weight. What arrives is converted to bfloat16, which
holds it exactly, and the product finds the same values again: nothing is rounded a second time.

Only `tensorwise` has one scale for both passes. Rows have other scales in the backward pass, where
they are columns, and so do blocks.
"""

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import ScalingType

from meshtrain.compat.fsdp import gather_as
from meshtrain.compat.nn import parameter_table
from meshtrain.config.plan import Float8Plan, ParallelPlan
from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.float8.product import E4M3, RECIPES, scale_for
from meshtrain.parallel.shard import fsdp_modules


def gathers_in_float8(plan: ParallelPlan) -> bool:
    """Return whether FSDP2 gathers the weights of a resolved plan in float8, where it can.

    It cannot with parameters on the host, which it copies to the device first.
    """
    is_float8 = plan.precision.compute == "float8" and plan.shard.offload == "none"
    return is_float8 and plan.mesh.is_sharded and has_one_scale(plan.precision.float8)


def has_one_scale(plan: Float8Plan) -> bool:
    """Return whether a weight has the same scale in all its products."""
    return RECIPES[plan.recipe].scaling is ScalingType.TensorWise


def apply_float8_gather(stage: Stage, layers: Collection[nn.Module]) -> None:
    """Let FSDP2 gather the weights of linear layers in float8.

    Args:
        stage: sharded.
        layers: those of it that compute in float8.
    """
    # Layers may share a weight with modules that need all its digits.
    others = [module for module in stage.model.modules() if module not in layers]
    needed = {parameter for module in others for parameter in module.parameters(recurse=False)}
    weights = {weight for layer in layers if (weight := parameter_table(layer)["weight"]) is not None} - needed
    for module in fsdp_modules(stage.model):
        gather_as(module, weights, _InFloat8())


class _InFloat8:
    """The form in which the weights of one group of FSDP2 are sent: e4m3, as bytes."""

    def encode(self, shards: Sequence[Tensor], group: dist.ProcessGroup) -> list[tuple[Tensor, Tensor]]:
        """Return for each weight the bytes (elements,) of its part, and its () scale."""
        weights = [shard.to(torch.bfloat16) for shard in shards]
        largest = torch.stack([weight.abs().amax() for weight in weights]).float()
        # One message for all weights of the group.
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        factors = scale_for(largest, E4M3)
        return [
            # Not every backend sends float8.
            ((weight * factor.to(weight.dtype)).to(E4M3).view(torch.uint8), factor.reciprocal())
            for weight, factor in zip(weights, factors, strict=True)
        ]

    def decode(self, sent: Tensor, known: Tensor, into: Tensor) -> None:
        """Fill a weight with the values of bytes times their scale."""
        into.copy_(sent.view(E4M3)).mul_(known)
