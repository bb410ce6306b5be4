"""Tensor parallelism: the styles of a plan, applied to the modules of a stage.

Weights become DTensors, so that sharding over dp, checkpoints and initialisation know the global tensor. The arithmetic
is on plain local tensors with the four collectives per layer that Megatron has: DTensor dispatch in every projection
would cost a tenth of a step and seven collectives.

Between attention and MLP the stream is replicated over tp, or with `sequence_parallel` each process keeps its part of
the sequence. The sequence is split at the first decoder layer and joined behind the last, so embedding, final norm and
head are the same in both cases. A parameter that only sees part of the sequence (norms, biases behind a row-wise
projection) or part of the heads (q_norm, k_norm) gets a partial gradient: its name goes into `summed_over_tp`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from transformers.pytorch_utils import Conv1D

from meshtrain.config.plan import Style, TensorPlan
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.collectives import (
    copy_to_shards,
    gather_sequence,
    gather_vocabulary,
    join_sequence,
    reduce_from_shards,
    scatter_sequence,
    shard_width,
    split_sequence,
)
from meshtrain.parallel.cut import Stage
from meshtrain.parallel.randomness import draw_key, separate_head_streams, stream_key
from meshtrain.parallel.rules import TensorRules, name_of, sharded_dims

Edge = Callable[[Tensor], Tensor]


def apply_tensor_parallel(stage: Stage, mesh: DeviceMesh, plan: TensorPlan, rules: TensorRules) -> set[str]:
    """Shard the modules of a stage over the tp axis, in place.

    Args:
        stage: on the meta device, unfused and cut.
        mesh: the 1-D tp mesh.
        plan: its switches.
        rules: of the whole model.

    Returns:
        The names of the parameters whose gradients are partial over tp.
    """
    group = mesh.get_group()
    layers_prefix = name_of(stage.model, stage.layers) + "."
    outside = Region(group, sequence_parallel=False)
    inside = Region(group, sequence_parallel=plan.sequence_parallel)
    head = stage.model.get_output_embeddings()
    shared = {name for name, style in rules.styles.items() if style == "shared_input"}
    summed_over_tp: set[str] = set()
    for name, module in list(stage.model.named_modules()):
        style = rules.styles.get(name)
        if style is None or not any(True for _ in module.parameters()):
            continue
        region = inside if name.startswith(layers_prefix) else outside
        entered = any(name.startswith(f"{ancestor}.") for ancestor in shared)
        whole_logits = not (rules.logits_are_sharded and module is head)
        parallelize_module(module, mesh, _STYLES[style](region, entered, whole_logits))
        summed_over_tp |= {f"{name}.{kind}" for kind in _partial_parameters(style, module, region)}
    for name, module in stage.model.named_modules():
        for attribute in rules.local_attributes.get(name, []):
            setattr(module, attribute, getattr(module, attribute) // group.size())
    if plan.sequence_parallel:
        _shard_stream(stage, group)
    separate_head_streams(stage.model, group)
    _tie_again(stage)
    return summed_over_tp


@dataclass(frozen=True)
class Region:
    """How the stream lies on the tp group in a part of the model, and how to cross into sharded weights and back."""

    group: ProcessGroup
    sequence_parallel: bool

    def enter(self, x: Tensor) -> Tensor:
        """Make the stream whole for a column-wise projection."""
        return gather_sequence(x, self.group) if self.sequence_parallel else copy_to_shards(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Sum the partial results of a row-wise projection back into the stream."""
        return scatter_sequence(x, self.group) if self.sequence_parallel else reduce_from_shards(x, self.group)


def _partial_parameters(style: Style, module: nn.Module, region: Region) -> list[str]:
    if style == "replicated_with_grad_allreduce" or (style == "sequence_parallel" and region.sequence_parallel):
        return [kind for kind, _ in module.named_parameters()]
    if style == "rowwise" and region.sequence_parallel and getattr(module, "bias", None) is not None:
        return ["bias"]
    return []


def _nothing(x: Tensor) -> Tensor:
    return x


class ShardedLinear(nn.Linear):
    """A Linear that holds a shard of its weight; `enter` and `leave` are the collectives around it."""

    enter: Edge
    leave: Edge
    bias_is_whole: bool

    def forward(self, x: Tensor) -> Tensor:
        """Project (batch, seq, in or in/tp) to (batch, seq, out/tp or out)."""
        bias = None if self.bias is None else local_tensor(self.bias)
        if bias is None or not self.bias_is_whole:
            return self.leave(F.linear(self.enter(x), local_tensor(self.weight), bias))
        return self.leave(F.linear(self.enter(x), local_tensor(self.weight))) + bias


class ShardedConv1D(Conv1D):
    """A Conv1D (transposed Linear) that holds a shard of its weight."""

    enter: Edge
    leave: Edge
    bias_is_whole: bool

    def forward(self, x: Tensor) -> Tensor:
        """Project (batch, seq, in or in/tp) to (batch, seq, out/tp or out)."""
        x, weight, bias = self.enter(x), local_tensor(self.weight), local_tensor(self.bias)
        flat = x.view(-1, x.shape[-1])
        if not self.bias_is_whole:
            return self.leave(torch.addmm(bias, flat, weight).view(*x.shape[:-1], weight.shape[-1]))
        return self.leave(torch.mm(flat, weight).view(*x.shape[:-1], weight.shape[-1])) + bias


class ShardedEmbedding(nn.Embedding):
    """An Embedding that holds some rows of its table; other rows count as zero until the sum over tp."""

    leave: Edge
    first_row: int

    def forward(self, input_ids: Tensor) -> Tensor:
        """Look up (batch, seq) ids, giving (batch, seq, hidden)."""
        weight = local_tensor(self.weight)
        rows = input_ids - self.first_row
        elsewhere = (rows < 0) | (rows >= weight.shape[0])
        padding = None if self.padding_idx is None else self.padding_idx - self.first_row
        if padding is not None and not 0 <= padding < weight.shape[0]:
            padding = None
        found = F.embedding(rows.masked_fill(elsewhere, 0), weight, padding)
        return self.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0.0))


SHARDED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: ShardedLinear,
    Conv1D: ShardedConv1D,
    nn.Embedding: ShardedEmbedding,
}


class _Style(ParallelStyle):
    def __init__(self, region: Region, entered: bool, whole_logits: bool) -> None:
        super().__init__()
        self.region, self.entered, self.whole_logits = region, entered, whole_logits


class _Replicate(_Style):
    """Every process computes the same, or its part of the sequence, with whole parameters."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


class _SharedInput(_Style):
    """Make the input of a block whole once for all its projections, instead of once in each."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if args:
                return (self.region.enter(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": self.region.enter(kwargs["hidden_states"])}

        module.register_forward_pre_hook(enter, with_kwargs=True)
        return module


class _Colwise(_Style):
    """Shard the outputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _become_sharded(module, "colwise", device_mesh)
        module.enter = _nothing if self.entered else self.region.enter  # type: ignore[assignment]
        module.leave = self._leave(module)  # type: ignore[assignment]
        module.bias_is_whole = False  # type: ignore[assignment]
        return module

    def _leave(self, module: nn.Module) -> Edge:
        return _nothing


class _ColwiseGatherOutput(_Colwise):
    """Shard the outputs and join them, unless they are logits that the loss takes sharded."""

    def _leave(self, module: nn.Module) -> Edge:
        if not self.whole_logits:
            return _nothing
        outputs = module.weight.shape[sharded_dims("colwise", module)["weight"]]  # type: ignore[index]
        return partial(gather_vocabulary, vocabulary=outputs, group=self.region.group)  # type: ignore[arg-type]


class _Rowwise(_Style):
    """Shard the inputs; the results are partial sums."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _become_sharded(module, "rowwise", device_mesh)
        module.enter = _nothing  # type: ignore[assignment]
        module.leave = self.region.leave  # type: ignore[assignment]
        module.bias_is_whole = True  # type: ignore[assignment]
        return module


class _EmbeddingRowwise(_Style):
    """Shard the vocabulary of an embedding."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _become_sharded(module, "embedding_rowwise", device_mesh)
        width = shard_width(module.num_embeddings, self.region.group)  # type: ignore[arg-type]
        module.leave = self.region.leave  # type: ignore[assignment]
        module.first_row = self.region.group.rank() * width  # type: ignore[assignment]
        return module


_STYLES: dict[Style, type[_Style]] = {
    "colwise": _Colwise,
    "colwise_gather_output": _ColwiseGatherOutput,
    "rowwise": _Rowwise,
    "embedding_rowwise": _EmbeddingRowwise,
    "sequence_parallel": _Replicate,
    "replicate": _Replicate,
    "replicated_with_grad_allreduce": _Replicate,
    "shared_input": _SharedInput,
}


def _become_sharded(module: nn.Module, style: Style, mesh: DeviceMesh) -> None:
    for kind, dim in sharded_dims(style, module).items():
        parameter = getattr(module, kind, None)
        if parameter is not None:
            shards = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
            module.register_parameter(kind, nn.Parameter(shards, requires_grad=parameter.requires_grad))
    # In place, so that the name, the parameters and what others hold of the module stay the same.
    module.__class__ = SHARDED[type(module)]


def _shard_stream(stage: Stage, group: ProcessGroup) -> None:
    """Split the sequence before the first decoder layer of the model and join it behind the last."""
    after: dict[str, int] = {}

    def begin() -> None:
        # From here on every draw is for this process's part of the sequence. The key of the shared stream that goes
        # on behind the last layer is drawn before.
        after["key"] = draw_key()
        torch.manual_seed(stream_key(draw_key(), group.rank()))

    def split(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        begin()
        return (split_sequence(args[0], group), *args[1:])

    def arrive(_: nn.Module, args: tuple[Any, ...]) -> None:
        begin()

    def join(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        torch.manual_seed(after["key"])
        return (
            (join_sequence(output[0], group), *output[1:])
            if isinstance(output, tuple)
            else join_sequence(output, group)
        )

    if stage.is_first:
        stage.layers[0].register_forward_pre_hook(split)
    else:
        stage.layers[stage.first_layer - 1].register_forward_pre_hook(arrive)
    if stage.is_last:
        stage.layers[len(stage.layers) - 1].register_forward_hook(join)


def _tie_again(stage: Stage) -> None:
    # Sharding made a new parameter of each end of a tie.
    for copy_name, source in stage.tied.items():
        if _holds(stage.model, source):
            owner = stage.model.get_submodule(copy_name.rpartition(".")[0])
            owner.register_parameter(copy_name.rpartition(".")[2], stage.model.get_parameter(source))


def _holds(model: nn.Module, parameter: str) -> bool:
    return any(name == parameter for name, _ in model.named_parameters(remove_duplicate=False))
