"""Module classes that hold a shard of their weights.

A stock module becomes one of them in place, so its name and its owners stay the same.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from meshtrain.compat.nn import become, mix_in, module_table, own_class, parameter_table
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.tensor.head_share import Heads
from meshtrain.parallel.tensor.late_gradients import LateWeight, Product
from meshtrain.parallel.tensor.region import Edge


class ShardedLinear(nn.Linear, LateWeight):
    """A Linear that holds a shard of its weight.

    Attributes:
        enter: collective on the input.
        leave: collective on the output.
        bias_is_full: whether every process has the full bias, which is added after `leave`.
        product: multiplies by the shard.
    """

    enter: Edge
    leave: Edge
    bias_is_full: bool
    product: Product = staticmethod(F.linear)
    is_transposed = False

    def forward(self, x: Tensor) -> Tensor:
        """Project (batch, seq, in or in/tp) to (batch, seq, out/tp or out)."""
        bias = None if self.bias is None else local_tensor(self.bias)
        if bias is None or not self.bias_is_full:
            return self.leave(self.multiply(self.enter(x), bias))
        return self.leave(self.multiply(self.enter(x), None)) + bias


class OwnOutputs:
    """Mixin for a projection with full parameters that computes the outputs of some heads.

    Attributes:
        enter: collective on the input.
        outputs: of the heads of this process, in order.
        product: multiplies by their rows of the weight.
    """

    enter: Edge
    outputs: Sequence[slice]
    product: Product = staticmethod(F.linear)

    def forward(self, x: Tensor) -> Tensor:
        """Project (batch, seq, in) to (batch, seq, outputs of its heads)."""
        bias = getattr(self, "bias", None)
        rows = None if bias is None else rows_of(bias, self.outputs)
        return self.product(self.enter(x), rows_of(_matrix(self), self.outputs), rows)


class OwnInputs:
    """Mixin for a projection with full parameters that gets the inputs of some heads.

    Attributes:
        leave: collective that sums the output over tp.
        inputs: columns of the weight for the heads of this process.
        has_bias: whether this process adds the bias, as one of them does.
        product: multiplies by these columns.
    """

    leave: Edge
    inputs: slice
    has_bias: bool
    product: Product = staticmethod(F.linear)

    def forward(self, x: Tensor) -> Tensor:
        """Project (batch, seq, inputs of its heads) to (batch, seq, out)."""
        bias = getattr(self, "bias", None)
        if bias is not None and not self.has_bias:
            # Every process has a gradient, so that none must tell the others that it has none.
            bias = bias * 0.0
        return self.leave(self.product(x, _matrix(self)[:, self.inputs], bias))


def width_of(projection: nn.Module, side: Literal["inputs", "outputs"]) -> int:
    """Return the number of inputs or outputs of a Linear or Conv1D."""
    rows, columns = projection.get_parameter("weight").shape
    return rows if (side == "inputs") == isinstance(projection, Conv1D) else columns


def slices_of(heads: Sequence[int], width: int) -> list[slice]:
    """Return where heads of a width lie in the outputs of a projection, consecutive ones joined."""
    slices: list[slice] = []
    for head in heads:
        if slices and slices[-1].stop == head * width:
            slices[-1] = slice(slices[-1].start, (head + 1) * width)
        else:
            slices.append(slice(head * width, (head + 1) * width))
    return slices


def rows_of(tensor: Tensor, slices: Sequence[slice]) -> Tensor:
    return tensor[slices[0]] if len(slices) == 1 else torch.cat([tensor[rows] for rows in slices])


def _matrix(projection: Any) -> Tensor:
    """Return the weight of a Linear or Conv1D as (out, in)."""
    weight: Tensor = projection.weight
    return weight.T if isinstance(projection, Conv1D) else weight


def _transposed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    flat = x.view(-1, x.shape[-1])
    y = torch.mm(flat, weight) if bias is None else torch.addmm(bias, flat, weight)
    return y.view(*x.shape[:-1], weight.shape[-1])


class ShardedConv1D(Conv1D, LateWeight):
    """A Conv1D (transposed Linear) that holds a shard of its weight; see `ShardedLinear`."""

    enter: Edge
    leave: Edge
    bias_is_full: bool
    product: Product = staticmethod(_transposed_linear)
    is_transposed = True

    def forward(self, x: Tensor) -> Tensor:
        """Project (batch, seq, in or in/tp) to (batch, seq, out/tp or out)."""
        x, bias = self.enter(x), local_tensor(self.bias)
        if not self.bias_is_full:
            return self.leave(self.multiply(x, bias))
        return self.leave(self.multiply(x, None)) + bias


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
        return self.leave(self.own_rows(input_ids, local_tensor(self.weight)))

    def own_rows(self, input_ids: Tensor, table: Tensor) -> Tensor:
        """Look up ids in the rows of a table of which this process holds the same as of the weight.

        Args:
            input_ids: (batch, seq).
            table: (vocab/tp, columns).

        Returns:
            (batch, seq, columns), zero where another process holds the row.
        """
        rows = input_ids - self.first_row
        # An id outside the vocabulary is looked up as well, so that it fails as in the stock model.
        elsewhere = ((rows < 0) | (rows >= table.shape[0])) & (input_ids >= 0) & (input_ids < self.num_embeddings)
        padding = None if self.padding_idx is None else self.padding_idx - self.first_row
        if padding is not None and not 0 <= padding < table.shape[0]:
            padding = None
        found = F.embedding(rows.masked_fill(elsewhere, 0), table, padding)
        return found.masked_fill(elsewhere.unsqueeze(-1), 0.0)


class LocalParameters:
    """Mixin for a module whose own parameters are DTensors: its stock forward sees local shards.

    Attributes:
        added_elsewhere: names of the parameters that another process adds; they are zero here.
    """

    added_elsewhere: tuple[str, ...]

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the stock forward on the local tensors of its own parameters."""
        parameters = parameter_table(self)
        stored = dict(parameters)
        local = {kind: local_tensor(value) for kind, value in stored.items() if value is not None}
        # Every process has a gradient, so that none must tell the others that it has none.
        local |= {kind: local[kind] * 0.0 for kind in self.added_elsewhere}
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
        own: number of all heads -> indices of those of this process.
    """

    own: Callable[[int], Sequence[int]]

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the stock forward on the parameters and modules of this process's heads."""
        parameters, modules = parameter_table(self), module_table(self)
        all_parameters, all_modules = dict(parameters), dict(modules)
        own = {kind: self._take(value) for kind, value in all_parameters.items() if value is not None}
        lists = {kind: self._pick(value) for kind, value in all_modules.items() if isinstance(value, nn.ModuleList)}
        parameters.update(own)
        modules.update(lists)
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            parameters.update(all_parameters)
            modules.update(all_modules)

    def _take(self, values: Tensor) -> Tensor:
        indices = type(self).own(len(values))
        if isinstance(indices, range):
            return values[indices.start : indices.stop]
        return torch.stack([values[index] for index in indices])

    def _pick(self, values: nn.ModuleList) -> nn.ModuleList:
        return nn.ModuleList([values[index] for index in type(self).own(len(values))])


def see_own_heads(module: nn.Module, rank: int, tp: int, heads: Heads | None = None) -> None:
    """Mix `OwnHeads` into one module, for process `rank` of `tp`.

    Args:
        heads: of the model, if tp does not divide their numbers.
    """
    see_heads(module, _own_heads(rank, tp, heads))


def see_heads(module: nn.Module, own: Callable[[int], Sequence[int]]) -> None:
    """Mix `OwnHeads` into one module.

    Args:
        own: number of all heads -> indices of those that the module shall see.
    """
    mix_in(module, OwnHeads, own=_static(own))


@cache
def _own_heads(rank: int, tp: int, heads: Heads | None) -> Callable[[int], Sequence[int]]:
    return partial(_own_indices, rank, tp, heads)


@cache
def _static(function: Callable[[int], Sequence[int]]) -> Any:
    """Return one object for all modules, which then share a class."""
    return staticmethod(function)


def _own_indices(rank: int, tp: int, heads: Heads | None, count: int) -> Sequence[int]:
    if heads is not None and count in (heads.queries, heads.keys):
        share = heads.of(rank, tp)
        return share.queries if count == heads.queries else share.keys
    first = rank * count // tp
    return range(first, first + max(1, count // tp))


def see_local_parameters(module: nn.Module, added_elsewhere: Sequence[str] = ()) -> None:
    """Mix `LocalParameters` into one module."""
    mix_in(module, LocalParameters, added_elsewhere=tuple(added_elsewhere))


def become_sharded(module: nn.Module) -> None:
    """Turn a stock projection or embedding into its sharded class, in place."""
    if isinstance(module, nn.Embedding):
        # A subclass keeps its own forward, which calls that of the sharded embedding. Gemma, for
        # example, scales the rows.
        kind = own_class(module)
        become(module, ShardedEmbedding if kind is nn.Embedding else type(kind.__name__, (kind, ShardedEmbedding), {}))
    else:
        become(module, ShardedConv1D if isinstance(module, Conv1D) else ShardedLinear)
