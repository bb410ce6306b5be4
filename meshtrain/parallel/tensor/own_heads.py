"""The classes that apply the styles of projections and parameters of heads that stay full."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshtrain.compat.nn import mix_in
from meshtrain.parallel.tensor.context import AppliedStyle
from meshtrain.parallel.tensor.head_share import Heads, HeadShare, heads_of, uneven_heads
from meshtrain.parallel.tensor.modules import OwnInputs, OwnOutputs, see_own_heads, slices_of, width_of
from meshtrain.parallel.tensor.region import identity


class OwnHeads(AppliedStyle):
    """A projection to heads that tp does not divide stays full.

    Each process computes the outputs of its heads.
    """

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        heads, group = self.heads(), self.region.group
        share = heads.of(group.rank(), group.size())
        mix_in(module, OwnOutputs)
        module.enter = identity if self.context.entered else self.region.enter  # type: ignore[assignment]
        module.outputs = self.outputs(heads, share, width_of(module, "outputs"))  # type: ignore[assignment]
        return module

    def outputs(self, heads: Heads, share: HeadShare, width: int) -> list[slice]:
        return slices_of(share.queries, width // heads.queries)

    def heads(self) -> Heads:
        heads = heads_of(self.context.config)
        assert heads is not None, "the plan is not checked"
        return heads


class ReplicatedHeads(OwnHeads):
    """A projection to key-value heads stays full, and each process computes those it needs."""

    def outputs(self, heads: Heads, share: HeadShare, width: int) -> list[slice]:
        return slices_of(share.keys, width // heads.keys)


class OwnHeadsRowwise(OwnHeads):
    """A projection of uneven heads stays full, and its results are partial sums."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        heads, group = self.heads(), self.region.group
        share = heads.of(group.rank(), group.size())
        mix_in(module, OwnInputs)
        (module.inputs,) = slices_of(share.queries, width_of(module, "inputs") // heads.queries)  # type: ignore[assignment]
        module.leave = self.region.leave  # type: ignore[assignment]
        module.has_bias = group.rank() == 0  # type: ignore[assignment]
        return module


class PerHead(AppliedStyle):
    """The parameters that each head has for itself stay full.

    Each process computes with the parameters of its heads.
    """

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        group = self.region.group
        see_own_heads(module, group.rank(), group.size(), uneven_heads(self.context.config, group.size()))
        return module
