"""The classes that apply the styles of keys and values that all heads share."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshtrain.parallel.tensor.collectives import copy_to_shards
from meshtrain.parallel.tensor.context import AppliedStyle, ModuleContext, change_output
from meshtrain.parallel.tensor.requirements import mla_rope_width


class SharedOutputs(AppliedStyle):
    """A projection stays full, and the shards of all processes use its outputs."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(partial(change_output, self._share))
        return module

    def _share(self, outputs: Tensor) -> Tensor:
        return copy_to_shards(outputs, self.region.group)


class MlaKvAProj(AppliedStyle):
    """A projection stays full whose last outputs are the rotary key that all heads share."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        share_rotary_key(module, self.context)
        return module


def share_rotary_key(module: nn.Module, context: ModuleContext) -> None:
    """Sum the gradient of a module's last outputs, the rotary key, over the heads of all processes.

    Args:
        module: the projection, or its counterpart in an adapter.
        context: of the projection.
    """
    width = mla_rope_width(context.config)
    assert width is not None, "the plan is not checked"
    tail: int = width

    def copy_tail(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        latent, rope = output.split([output.shape[-1] - tail, tail], dim=-1)
        return torch.cat([latent, copy_to_shards(rope, context.region.group)], dim=-1)

    module.register_forward_hook(copy_tail)
