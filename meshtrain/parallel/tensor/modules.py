"""Modules that hold a shard of their weights: a stock module becomes one in place, so names and owners stay."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from meshtrain.compat.nn import become, mix_in, parameter_table
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.tensor.region import Edge


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


class ReplicatedHeadsLinear(nn.Linear):
    """A Linear with a whole weight that computes the outputs of one key-value head: there are fewer than processes."""

    enter: Edge
    rows: slice

    def forward(self, x: Tensor) -> Tensor:
        """Project (batch, seq, in) to (batch, seq, head_dim)."""
        bias = None if self.bias is None else self.bias[self.rows]
        return F.linear(self.enter(x), self.weight[self.rows], bias)


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
        # An id that is nowhere is looked up all the same: it fails, as it does in the stock model.
        elsewhere = ((rows < 0) | (rows >= weight.shape[0])) & (input_ids >= 0) & (input_ids < self.num_embeddings)
        padding = None if self.padding_idx is None else self.padding_idx - self.first_row
        if padding is not None and not 0 <= padding < weight.shape[0]:
            padding = None
        found = F.embedding(rows.masked_fill(elsewhere, 0), weight, padding)
        return self.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0.0))


class LocalParameters:
    """Mixed into a module whose own parameters are DTensors: its stock forward sees the local shards."""

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the stock forward on local tensors."""
        parameters = parameter_table(self)
        whole = dict(parameters)
        local = {kind: local_tensor(value) for kind, value in whole.items() if value is not None}
        parameters.update(local)
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            parameters.update(whole)


class OwnHeads:
    """Mixed into a module whose heads have parameters of their own: its stock forward sees those of this process.

    The first dimension of each of its own parameters counts heads, and so does each list of modules inside.
    """

    rank: int
    tp: int

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the stock forward on the parameters and modules of this process's heads."""
        parameters, modules = self._parameters, self._modules  # type: ignore[attr-defined]
        all_parameters, all_modules = dict(parameters), dict(modules)
        own = {kind: self._own(value) for kind, value in all_parameters.items() if value is not None}
        lists = {kind: self._own(value) for kind, value in all_modules.items() if isinstance(value, nn.ModuleList)}
        parameters.update(own)
        modules.update(lists)
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            parameters.update(all_parameters)
            modules.update(all_modules)

    def _own(self, values: Tensor | nn.ModuleList) -> Tensor | nn.ModuleList:
        first = self.rank * len(values) // self.tp
        return values[first : first + max(1, len(values) // self.tp)]


def see_own_heads(module: nn.Module, rank: int, tp: int) -> None:
    """Mix `OwnHeads` into one module, for one of `tp` processes."""
    module.__class__ = type(type(module).__name__, (OwnHeads, type(module)), {"rank": rank, "tp": tp})


def see_local_parameters(module: nn.Module) -> None:
    """Mix `LocalParameters` into one module."""
    mix_in(module, LocalParameters)


def become_sharded(module: nn.Module) -> None:
    """Give a stock projection or embedding the forward that works on a shard, in place."""
    if isinstance(module, nn.Embedding):
        # A subclass (Gemma scales what it looks up) keeps its own forward, around that of the sharded embedding.
        kind = type(module)
        become(module, ShardedEmbedding if kind is nn.Embedding else type(kind.__name__, (kind, ShardedEmbedding), {}))
    else:
        become(module, ShardedConv1D if isinstance(module, Conv1D) else ShardedLinear)
