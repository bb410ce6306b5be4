"""Apply the styles of stacked experts, and of other modules whose own parameters are sharded."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshtrain.compat.transformers import leave_out_experts, loops_over_experts
from meshtrain.parallel.tensor.collectives import copy_to_shards, reduce_from_shards
from meshtrain.parallel.tensor.context import AppliedStyle, Inputs, change_output, full_biases
from meshtrain.parallel.tensor.modules import see_local_parameters
from meshtrain.parallel.tensor.probes import skips_index_past_end


class LocalParams(AppliedStyle):
    """A module with parameters of its own (attention sinks) computes with its shards of them."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self.shard_parameters(module, mesh)
        see_local_parameters(module, self._added_elsewhere(module))
        return module

    def _added_elsewhere(self, module: nn.Module) -> list[str]:
        return []


class Experts(LocalParams):
    """Stacked experts are sharded.

    All processes receive all tokens and routing weights, and their results are summed. The first
    process adds the biases that are not sharded.
    """

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(partial(change_output, self._leave))
        return super().apply(module, mesh)

    def _added_elsewhere(self, module: nn.Module) -> list[str]:
        is_first = self.region.group.rank() == 0
        return [] if is_first else full_biases(self.context.name, module, self.context.sharded_dims)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        return tuple(map(self._copy, args)), {name: self._copy(value) for name, value in kwargs.items()}

    def _leave(self, x: Tensor) -> Tensor:
        return reduce_from_shards(x, self.region.group)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return copy_to_shards(value, self.region.group)
        return value


class ExpertParallel(Experts):
    """Every process holds complete experts, but only some of them.

    A token for an expert of another process gets an index that is not an expert, and no weight.
    """

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        group = self.region.group
        module.num_experts = module.num_experts // group.size()  # type: ignore[operator,assignment]
        self.first = group.rank() * module.num_experts  # type: ignore[operator]
        self.num_experts: int = module.num_experts  # type: ignore[assignment]
        leave_out_experts(module)
        # A loop over experts that fails at this index (GPT-OSS) runs the first expert instead, with
        # weight zero.
        loops = loops_over_experts(self.context.config)
        width = self.context.config.hidden_size
        self.none = 0 if loops and not skips_index_past_end(module, self.num_experts, width) else self.num_experts
        return super().apply(module, mesh)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        (hidden, index, weights, *rest), kwargs = super()._enter(module, args, kwargs)
        index = index - self.first
        elsewhere = (index < 0) | (index >= self.num_experts)
        index = index.masked_fill(elsewhere, self.none)
        return (hidden, index, weights.masked_fill(elsewhere, 0.0), *rest), kwargs
