"""The table of styles, and the classes that apply them.

Only this table has facts about single styles; `derive` chooses among them by name. A new style
needs its name in `meshtrain.config.plan.Style`, and here a row and a class that applies it.
"""

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshtrain.config.plan import Style
from meshtrain.parallel.tensor.collectives import (
    gather_vocabulary,
    join_sequence,
    shard_width,
    split_features,
    split_sequence,
)
from meshtrain.parallel.tensor.context import AppliedStyle, change_input, change_output
from meshtrain.parallel.tensor.experts import ExpertParallel, Experts, LocalParams
from meshtrain.parallel.tensor.late_gradients import Entrance
from meshtrain.parallel.tensor.modules import become_sharded
from meshtrain.parallel.tensor.own_heads import OwnHeads, OwnHeadsRowwise, PerHead, ReplicatedHeads
from meshtrain.parallel.tensor.region import Edge, identity
from meshtrain.parallel.tensor.requirements import (
    require_heads,
    require_key_value_groups,
    require_lookup,
    require_projection,
    require_rotary_key,
    require_separate_experts,
)
from meshtrain.parallel.tensor.shared_keys import MlaKvAProj, SharedOutputs
from meshtrain.parallel.tensor.style_row import StyleRow


class _Replicate(AppliedStyle):
    """Every process computes the same, or its part of the sequence, with full parameters."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return module


class _Block(LocalParams):
    """A block may have sharded parameters of its own, such as attention sinks."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return super().apply(module, mesh) if self.shards_parameters(module) else module


class _SharedInput(_Block):
    """The input of a block is made full once for all its projections, instead of once in each."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module = super().apply(module, mesh)
        module.register_forward_pre_hook(partial(change_input, Entrance(self.region, module)), with_kwargs=True)
        return module


class _WholeSequence(_Block):
    """Every process computes a block on the full sequence, which is split outside of the block."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module = super().apply(module, mesh)
        if self.region.sequence_parallel:
            module.register_forward_pre_hook(partial(change_input, self._join), with_kwargs=True)
            module.register_forward_hook(partial(change_output, self._split))
        return module

    def _join(self, x: Tensor) -> Tensor:
        if not self.region.is_split():
            return x
        full = join_sequence(x, self.region.group)
        self.full_shape = full.shape
        return full

    def _split(self, x: Tensor) -> Tensor:
        if not self.region.is_split():
            return x
        # The experts of Llama 4 return (batch * seq, hidden).
        part = split_sequence(x.view(self.full_shape), self.region.group)
        return part if x.dim() == part.dim() else part.flatten(0, 1)


class _Colwise(AppliedStyle):
    """The outputs of a projection are sharded."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        outputs = module.get_parameter("weight").shape[self.context.sharded_dims[f"{self.context.name}.weight"]]
        self.shard_parameters(module, mesh)
        become_sharded(module)
        module.enter = identity if self.context.entered else Entrance(self.region, module)  # type: ignore[assignment]
        module.leave = self._leave(outputs)  # type: ignore[assignment]
        module.bias_is_full = False  # type: ignore[assignment]
        module.is_columnwise = True  # type: ignore[assignment]
        return module

    def _leave(self, outputs: int) -> Edge:
        return identity


class _ColwiseGatherOutput(_Colwise):
    """The outputs are sharded, then joined, unless they are logits that the loss takes sharded."""

    def _leave(self, outputs: int) -> Edge:
        if not self.context.gathers_logits:
            return identity
        return partial(gather_vocabulary, vocabulary=outputs, group=self.region.group)


class _ColwiseBlocks(_Colwise):
    """The outputs of CodeGen's projection are sharded by its four blocks.

    Each block has query, value and key of a quarter of the heads. A process holds 4/tp complete
    blocks, but the forward of the model needs four. So each block is cut by heads into tp pieces.
    """

    def _leave(self, outputs: int) -> Edge:
        return partial(_cut_blocks, tp=self.region.group.size())


def _cut_blocks(x: Tensor, tp: int) -> Tensor:
    return x.unflatten(-1, (4 // tp, 3, tp, -1)).transpose(-3, -2).flatten(-4)


class _Rowwise(AppliedStyle):
    """The inputs of a projection are sharded, and its results are partial sums."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self.shard_parameters(module, mesh)
        become_sharded(module)
        module.enter = self._enter()  # type: ignore[assignment]
        module.leave = self.region.leave  # type: ignore[assignment]
        module.bias_is_full = True  # type: ignore[assignment]
        return module

    def _enter(self) -> Edge:
        return identity


class _RowwiseSplitInput(_Rowwise):
    """The inputs are sharded here, because every process has all of them."""

    def _enter(self) -> Edge:
        return partial(split_features, group=self.region.group)


class _EmbeddingRowwise(AppliedStyle):
    """The vocabulary of an embedding is sharded."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self.shard_parameters(module, mesh)
        become_sharded(module)
        width = shard_width(module.num_embeddings, self.region.group)  # type: ignore[arg-type]
        module.leave = self.region.leave  # type: ignore[assignment]
        module.first_row = self.region.group.rank() * width  # type: ignore[assignment]
        return module


STYLES: dict[Style, StyleRow] = {
    "colwise": StyleRow(
        apply=_Colwise,
        used_for="Linear, Conv1D",
        effect="The outputs are sharded over tp.",
        kind="projection",
        requires=require_projection,
        shards="outputs",
        gives="part",
        adapter="columns",
        is_for_parameters=True,
        transformers=("colwise",),
    ),
    "colwise_gather_output": StyleRow(
        apply=_ColwiseGatherOutput,
        used_for="the head",
        effect=(
            "Like `colwise`, and the outputs are gathered. With `loss_parallel` the loss uses the shards directly."
        ),
        kind="projection",
        requires=require_projection,
        shards="outputs",
        may_be_uneven=True,
        gives="gathered",
        needs_full_sequence=True,
        adapter="columns",
        is_for_head=True,
        transformers=("colwise_gather_output", "colwise_rep"),
    ),
    "colwise_blocks": StyleRow(
        apply=_ColwiseBlocks,
        used_for="interleaved fused projections",
        effect="Like `colwise`, in blocks that belong together.",
        kind="projection",
        requires=require_projection,
        shards="outputs",
        four_blocks=True,
        gives="part",
        adapter="columns",
    ),
    "rowwise": StyleRow(
        apply=_Rowwise,
        used_for="Linear, Conv1D",
        effect="The inputs are sharded, and the results summed.",
        kind="projection",
        requires=require_projection,
        shards="inputs",
        takes="part",
        gradients="bias partial if split",
        adapter="rows",
        is_for_parameters=True,
        transformers=("rowwise",),
    ),
    "rowwise_split_input": StyleRow(
        apply=_RowwiseSplitInput,
        used_for="Linear",
        effect="Like `rowwise`, after a module whose output is replicated.",
        kind="projection",
        requires=require_projection,
        shards="inputs",
        needs_full_sequence=True,
        adapter="rows",
        transformers=("rowwise_split_input", "rowwise_rep"),
    ),
    "embedding_rowwise": StyleRow(
        apply=_EmbeddingRowwise,
        used_for="Embedding",
        effect="The vocabulary is sharded. It need not divide evenly.",
        kind="lookup",
        requires=require_lookup,
        shards="rows",
        may_be_uneven=True,
        adapter="vocabulary",
        transformers=("embedding_rowwise",),
    ),
    "sequence_parallel": StyleRow(
        apply=_Replicate,
        used_for="norms inside the layers",
        effect=(
            "The parameters are replicated. With `sequence_parallel = true` each process applies them to its "
            "part of the sequence, and their gradients are summed."
        ),
        kind="replica",
        gradients="partial if split",
        adapter="full",
    ),
    "replicate": StyleRow(
        apply=_Replicate,
        used_for="modules outside the layers",
        effect="Every process computes the same.",
        kind="replica",
        needs_full_sequence=True,
        adapter="full",
        is_for_parameters=True,
        is_for_head=True,
        transformers=("replicate",),
    ),
    "replicated_with_grad_allreduce": StyleRow(
        apply=_Replicate,
        used_for="norms on heads (Qwen3), single parameters of a block",
        effect=(
            "The parameters are replicated, and each process applies them to its heads only. Their gradients "
            "are summed."
        ),
        kind="replica",
        gradients="partial",
        adapter="shared",
        is_for_parameters=True,
        transformers=("replicated_with_grad_allreduce",),
    ),
    "replicated_heads": StyleRow(
        apply=ReplicatedHeads,
        used_for="key and value",
        effect=(
            "tp does not divide the key-value heads. The weights are replicated, and each process computes the "
            "heads that it needs."
        ),
        kind="projection",
        requires=require_key_value_groups,
        gives="own keys",
        gradients="partial",
        adapter="columns",
    ),
    "colwise_heads": StyleRow(
        apply=OwnHeads,
        used_for="projections to uneven heads",
        effect=(
            "tp does not divide the attention heads. The weights are replicated, and each process computes its "
            "heads, one more on some processes than on others."
        ),
        kind="projection",
        requires=require_heads,
        gives="own heads",
        gradients="partial",
        adapter="columns",
    ),
    "rowwise_heads": StyleRow(
        apply=OwnHeadsRowwise,
        used_for="the projection after uneven heads",
        effect="The weights are replicated. The inputs are the heads of the process, and the results are summed.",
        kind="projection",
        requires=require_heads,
        takes="own heads",
        gradients="partial",
    ),
    "per_head": StyleRow(
        apply=PerHead,
        used_for="norms with parameters for each head (Cohere, StableLM)",
        effect=(
            "The parameters are replicated. Each process computes with those of its heads, and their "
            "gradients are summed."
        ),
        kind="replica",
        gradients="partial",
        own_heads=True,
    ),
    "shared_input": StyleRow(
        apply=_SharedInput,
        used_for="attention, MLP",
        effect=(
            "The input is gathered once for all projections: 4 collectives per layer and microbatch, not 7. "
            "Parameters of the block itself (attention sinks) need rules that shard them, or sum their gradients."
        ),
        kind="shared input",
        has_parameter_rules=True,
    ),
    "whole_sequence": StyleRow(
        apply=_WholeSequence,
        used_for="blocks that mix positions",
        effect=(
            "They get the full sequence, under sequence parallelism too. Rules may shard parameters of the block "
            "itself, or sum their gradients."
        ),
        kind="full sequence",
        has_parameter_rules=True,
    ),
    "mla_kv_a_proj": StyleRow(
        apply=MlaKvAProj,
        used_for="DeepSeek's latent attention",
        effect=(
            "The module is replicated. All heads share the rotary part of its output, so the gradient of "
            "that part is summed."
        ),
        kind="projection",
        requires=require_rotary_key,
        gradients="rotary key summed",
        needs_full_sequence=True,
        adapter="rotary key",
        transformers=("mla_kv_a_proj",),
    ),
    "shared_outputs": StyleRow(
        apply=SharedOutputs,
        used_for="a key or value that all heads share",
        effect="The module is replicated. All heads use its outputs, so the gradient of these is summed.",
        kind="projection",
        requires=require_projection,
        gradients="summed",
        needs_full_sequence=True,
    ),
    "local_params": StyleRow(
        apply=LocalParams,
        used_for="small parameters per head",
        effect="Each process takes those of its heads.",
        kind="parameters",
        needs_full_sequence=True,
        has_parameter_rules=True,
        transformers=("local_params",),
    ),
    "moe_tp_experts": StyleRow(
        apply=Experts,
        used_for="experts",
        effect="Each expert is sharded over tp. One process adds the biases that no rule shards.",
        kind="experts",
        needs_full_sequence=True,
        has_parameter_rules=True,
        transformers=("moe_tp_experts",),
    ),
    "expert_parallel": StyleRow(
        apply=ExpertParallel,
        used_for="experts",
        effect='Each process holds whole experts (`tensor.experts = "expert"`).',
        kind="experts",
        requires=require_separate_experts,
        shards="experts",
        needs_full_sequence=True,
    ),
}
