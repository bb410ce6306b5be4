"""Module classes that hold a shard of their weights.

A stock module becomes one of them in place, so its name and its owners stay the same.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from meshtrain.compat.nn import become, mix_in, module_table, own_class, parameter_table
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.tensor.region import Edge


class ShardedLinear(nn.Linear):
    """A Linear that holds a shard of its weight.

    Attributes:
        enter: collective on the input.
        leave: collective on the output.
        bias_is_full: whether every process has the full bias, which is added after `leave`.
    """

    enter: Edge
    leave: Edge
    bias_is_full: bool

    def forward(self, x: Tensor) -> Tensor:
        """Project (batch, seq, in or in/tp) to (batch, seq, out/tp or out)."""
        bias = None if self.bias is None else local_tensor(self.bias)
        if bias is None or not self.bias_is_full:
            return self.leave(F.linear(self.enter(x), local_tensor(self.weight), bias))
        return self.leave(F.linear(self.enter(x), local_tensor(self.weight))) + bias


class ReplicatedHeadsLinear(nn.Linear):
    """A Linear with a full weight that computes the outputs of one key-value head.

    It is used where there are fewer key-value heads than processes.

    Attributes:
        enter: collective on the input.
        rows: of the weight, for the key-value head of this process.
    """

    enter: Edge
    rows: slice

    def forward(self, x: Tensor) -> Tensor:
        """Project (batch, seq, in) to (batch, seq, head_dim)."""
        bias = None if self.bias is None else self.bias[self.rows]
        return F.linear(self.enter(x), self.weight[self.rows], bias)


class ShardedConv1D(Conv1D):
    """A Conv1D (transposed Linear) that holds a shard of its weight; see `ShardedLinear`."""

    enter: Edge
    leave: Edge
    bias_is_full: bool

    def forward(self, x: Tensor) -> Tensor:
        """Project (batch, seq, in or in/tp) to (batch, seq, out/tp or out)."""
        x, weight, bias = self.enter(x), local_tensor(self.weight), local_tensor(self.bias)
        flat = x.view(-1, x.shape[-1])
        if not self.bias_is_full:
            return self.leave(torch.addmm(bias, flat, weight).view(*x.shape[:-1], weight.shape[-1]))
        return self.leave(torch.mm(flat, weight).view(*x.shape[:-1], weight.shape[-1])) + bias


class ShardedEmbedding(nn.Embedding):
    """An Embedding that holds a shard of its rows; other rows count as zero until the sum over tp.

    Attributes:
        leave: collective that sums the output over tp.
        first_row: index of the first row that this process holds.
    """

    leave: Edge
    first_row: int

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the rows (batch, seq, hidden) of ids (batch, seq)."""
        weight = local_tensor(self.weight)
        rows = input_ids - self.first_row
        # An id outside the vocabulary is looked up as well, so that it fails as in the stock model.
        elsewhere = ((rows < 0) | (rows >= weight.shape[0])) & (input_ids >= 0) & (input_ids < self.num_embeddings)
        padding = None if self.padding_idx is None else self.padding_idx - self.first_row
        if padding is not None and not 0 <= padding < weight.shape[0]:
            padding = None
        found = F.embedding(rows.masked_fill(elsewhere, 0), weight, padding)
        return self.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0.0))


class LocalParameters:
    """Mixin for a module whose own parameters are DTensors: its stock forward sees local shards."""

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the stock forward on the local tensors of its own parameters."""
        parameters = parameter_table(self)
        stored = dict(parameters)
        local = {kind: local_tensor(value) for kind, value in stored.items() if value is not None}
        parameters.update(local)
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            parameters.update(stored)


class OwnHeads:
    """Mixin for a module whose heads have parameters of their own.

    Its stock forward sees the parameters of this process's heads. The first dimension of each of
    its own parameters counts heads, and so does each list of modules inside.

    Attributes:
        rank: of the process, among the `tp` that share the heads.
        tp: number of processes that share the heads.
    """

    rank: int
    tp: int

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the stock forward on the parameters and modules of this process's heads."""
        parameters, modules = parameter_table(self), module_table(self)
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
    """Mix `OwnHeads` into one module, for process `rank` of `tp`."""
    mix_in(module, OwnHeads, rank=rank, tp=tp)


def see_local_parameters(module: nn.Module) -> None:
    """Mix `LocalParameters` into one module."""
    mix_in(module, LocalParameters)


def become_sharded(module: nn.Module) -> None:
    """Turn a stock projection or embedding into its sharded class, in place."""
    if isinstance(module, nn.Embedding):
        # A subclass keeps its own forward, which calls that of the sharded embedding. Gemma, for
        # example, scales the rows.
        kind = own_class(module)
        become(module, ShardedEmbedding if kind is nn.Embedding else type(kind.__name__, (kind, ShardedEmbedding), {}))
    else:
        become(module, ShardedConv1D if isinstance(module, Conv1D) else ShardedLinear)
