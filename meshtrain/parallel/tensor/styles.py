"""The styles of a plan: each is a class that changes a module in place."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PretrainedConfig

from meshtrain.compat.dtensor import ModuleStyle
from meshtrain.compat.nn import become
from meshtrain.compat.transformers import leave_out_experts, loops_over_experts
from meshtrain.config.plan import Style
from meshtrain.parallel.tensor.collectives import (
    copy_to_shards,
    gather_vocabulary,
    join_sequence,
    reduce_from_shards,
    shard_width,
    split_features,
    split_sequence,
)
from meshtrain.parallel.tensor.modules import ReplicatedHeadsLinear, become_sharded, see_local_parameters, see_own_heads
from meshtrain.parallel.tensor.probes import has_place_for_none
from meshtrain.parallel.tensor.region import Edge, Region, nothing
from meshtrain.parallel.tensor.rules import TensorRules, mla_rope_width

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class ModuleContext:
    """The position of a module in the model, and what its style needs to know.

    Attributes:
        name: FQN of the module.
        region: how hidden states are distributed around the module.
        entered: whether the block around the module has already entered the sharded weights, so
            that the input of the module is full.
        gathers_logits: whether a gathered output is joined to the full one; False for logits that the
            loss takes sharded.
        rules: of the complete model.
        config: of the language model.
    """

    name: str
    region: Region
    entered: bool
    gathers_logits: bool
    rules: TensorRules
    config: PretrainedConfig


class _Style(ModuleStyle):
    def __init__(self, place: ModuleContext) -> None:
        super().__init__()
        self.place, self.region = place, place.region

    def _shard(self, module: nn.Module, mesh: DeviceMesh) -> None:
        for kind, parameter in list(module.named_parameters(recurse=False)):
            dim = self.place.rules.sharded_dims.get(f"{self.place.name}.{kind}")
            if dim is not None:
                shards = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
                module.register_parameter(kind, nn.Parameter(shards, requires_grad=parameter.requires_grad))


class _Replicate(_Style):
    """Every process computes the same, or its part of the sequence, with full parameters."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return module


class _SharedInput(_Style):
    """The input of a block is made full once for all its projections, instead of once in each."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(_change_input, self.region.enter), with_kwargs=True)
        return module


class _WholeSequence(_Style):
    """Every process computes a block on the full sequence, which is split outside of the block."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if self.region.sequence_parallel:
            module.register_forward_pre_hook(partial(_change_input, self._join), with_kwargs=True)
            module.register_forward_hook(partial(_change_output, self._split))
        return module

    def _join(self, x: Tensor) -> Tensor:
        if not self.region.is_split():
            return x
        whole = join_sequence(x, self.region.group)
        self.whole_shape = whole.shape
        return whole

    def _split(self, x: Tensor) -> Tensor:
        if not self.region.is_split():
            return x
        # The experts of Llama 4 return (batch * seq, hidden).
        part = split_sequence(x.view(self.whole_shape), self.region.group)
        return part if x.dim() == part.dim() else part.flatten(0, 1)


class _Colwise(_Style):
    """The outputs of a projection are sharded."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        outputs = _weight(module).shape[self.place.rules.sharded_dims[f"{self.place.name}.weight"]]
        self._shard(module, mesh)
        become_sharded(module)
        module.enter = nothing if self.place.entered else self.region.enter  # type: ignore[assignment]
        module.leave = self._leave(outputs)  # type: ignore[assignment]
        module.bias_is_full = False  # type: ignore[assignment]
        return module

    def _leave(self, outputs: int) -> Edge:
        return nothing


class _ColwiseGatherOutput(_Colwise):
    """The outputs are sharded, then joined, unless they are logits that the loss takes sharded."""

    def _leave(self, outputs: int) -> Edge:
        if not self.place.gathers_logits:
            return nothing
        return partial(gather_vocabulary, vocabulary=outputs, group=self.region.group)


class _ColwiseBlocks(_Colwise):
    """The outputs of CodeGen's projection are sharded by its four blocks.

    Each block has query, value and key of a quarter of the heads. A process holds 4/tp complete
    blocks, but the forward of the model needs four. So each block is cut by heads into tp pieces.
    """

    def _leave(self, outputs: int) -> Edge:
        return partial(_cut_blocks, tp=self.region.group.size())


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _cut_blocks(x: Tensor, tp: int) -> Tensor:
    return x.unflatten(-1, (4 // tp, 3, tp, -1)).transpose(-3, -2).flatten(-4)


class _ReplicatedHeads(_Style):
    """A projection to fewer key-value heads than processes stays full.

    Each process computes the one head that its queries need.
    """

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        heads, group = self.place.config.num_key_value_heads, self.region.group
        width = _weight(module).shape[0] // heads
        head = group.rank() * heads // group.size()
        become(module, ReplicatedHeadsLinear)
        module.enter = nothing if self.place.entered else self.region.enter  # type: ignore[assignment]
        module.rows = slice(head * width, (head + 1) * width)  # type: ignore[assignment]
        return module


class _PerHead(_Style):
    """The parameters that each head has for itself stay full.

    Each process computes with the parameters of its heads.
    """

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        see_own_heads(module, self.region.group.rank(), self.region.group.size())
        return module


class _Rowwise(_Style):
    """The inputs of a projection are sharded, and its results are partial sums."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self._shard(module, mesh)
        become_sharded(module)
        module.enter = self._enter()  # type: ignore[assignment]
        module.leave = self.region.leave  # type: ignore[assignment]
        module.bias_is_full = True  # type: ignore[assignment]
        return module

    def _enter(self) -> Edge:
        return nothing


class _RowwiseSplitInput(_Rowwise):
    """The inputs are sharded here, because every process has all of them."""

    def _enter(self) -> Edge:
        return partial(split_features, group=self.region.group)


class _EmbeddingRowwise(_Style):
    """The vocabulary of an embedding is sharded."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self._shard(module, mesh)
        become_sharded(module)
        width = shard_width(module.num_embeddings, self.region.group)  # type: ignore[arg-type]
        module.leave = self.region.leave  # type: ignore[assignment]
        module.first_row = self.region.group.rank() * width  # type: ignore[assignment]
        return module


class _MlaKvAProj(_Style):
    """A projection stays full whose last outputs are the rotary key that all heads share."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        share_rotary_key(module, self.place)
        return module


def share_rotary_key(module: nn.Module, place: ModuleContext) -> None:
    """Sum the gradient of a module's last outputs, the rotary key, over the heads of all processes.

    Args:
        module: the projection, or its counterpart in an adapter.
        place: context of the projection.
    """
    width = mla_rope_width(place.config)
    assert width is not None, "the plan is not checked"
    tail: int = width

    def copy_tail(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        latent, rope = output.split([output.shape[-1] - tail, tail], dim=-1)
        return torch.cat([latent, copy_to_shards(rope, place.region.group)], dim=-1)

    module.register_forward_hook(copy_tail)


class _LocalParams(_Style):
    """A module with parameters of its own (attention sinks) computes with its shards of them."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self._shard(module, mesh)
        see_local_parameters(module)
        return module


class _Experts(_LocalParams):
    """Stacked experts are sharded.

    All processes receive all tokens and routing weights, and their results are summed.
    """

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(partial(_change_output, self._leave))
        return super().apply(module, mesh)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        return tuple(map(self._copy, args)), {name: self._copy(value) for name, value in kwargs.items()}

    def _leave(self, x: Tensor) -> Tensor:
        return reduce_from_shards(x, self.region.group)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return copy_to_shards(value, self.region.group)
        return value


class _ExpertParallel(_Experts):
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
        loops = loops_over_experts(self.place.config)
        width = self.place.config.hidden_size
        self.none = 0 if loops and not has_place_for_none(module, self.num_experts, width) else self.num_experts
        return super().apply(module, mesh)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        (hidden, index, weights, *rest), kwargs = super()._enter(module, args, kwargs)
        index = index - self.first
        elsewhere = (index < 0) | (index >= self.num_experts)
        index = index.masked_fill(elsewhere, self.none)
        return (hidden, index, weights.masked_fill(elsewhere, 0.0), *rest), kwargs


def _change_input(change: Edge, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def _change_output(change: Edge, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


STYLES: dict[Style, type[_Style]] = {
    "colwise": _Colwise,
    "colwise_gather_output": _ColwiseGatherOutput,
    "colwise_blocks": _ColwiseBlocks,
    "rowwise": _Rowwise,
    "rowwise_split_input": _RowwiseSplitInput,
    "embedding_rowwise": _EmbeddingRowwise,
    "sequence_parallel": _Replicate,
    "replicate": _Replicate,
    "replicated_with_grad_allreduce": _Replicate,
    "replicated_heads": _ReplicatedHeads,
    "per_head": _PerHead,
    "shared_input": _SharedInput,
    "whole_sequence": _WholeSequence,
    "mla_kv_a_proj": _MlaKvAProj,
    "local_params": _LocalParams,
    "moe_tp_experts": _Experts,
    "expert_parallel": _ExpertParallel,
}
