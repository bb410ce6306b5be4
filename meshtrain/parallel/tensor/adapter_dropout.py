"""Dropout on the inputs of LoRA adapters, whose elements tp may divide."""

import torch
from torch import Tensor, nn

from meshtrain.parallel.tensor.collectives import SEQUENCE_DIM
from meshtrain.parallel.tensor.region import Region


class AdapterDropout(nn.Module):
    """Dropout on the input of an adapter.

    Processes with the same input drop the same elements. Processes with different inputs draw from
    a random stream of their own.

    Args:
        dropout: to apply.
        region: that the base of the adapter is in.
        is_cut: whether every process has its own features.
        takes_part: whether every process has the full input and takes its part of the sequence.
    """

    def __init__(self, dropout: nn.Module, region: Region, *, is_cut: bool, takes_part: bool) -> None:
        super().__init__()
        self.dropout, self.region, self.is_cut, self.takes_part = dropout, region, is_cut, takes_part

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of the input.

        Args:
            x: (batch, seq or seq/tp, features or features/tp).

        Returns:
            The same shape, or (batch, seq/tp, features) if it takes a part of the sequence.
        """
        is_split = self.region.is_split()
        if self.takes_part and is_split:
            # `split_sequence` would join the gradients of the parts. Here the gradient of the full
            # input is summed over tp already, and every process adds its part to that sum.
            group = self.region.group
            x = x.chunk(group.size(), SEQUENCE_DIM)[group.rank()]
        streams = self.region.streams
        if not self.training:
            return x
        assert streams is not None, "an adapter that drops needs random streams"
        with streams.of(is_cut=self.is_cut or is_split):
            return self.dropout(x)
