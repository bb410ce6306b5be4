"""Add rows for tokens that the pretrained model does not have."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from meshtrain.models.weights.block_reader import BlockReader
from meshtrain.models.weights.lazy_tensor import LazyTensor
from meshtrain.models.weights.operations import Ranges

_ROWS = 1024


def names_by_vocabulary(stock: PreTrainedModel) -> set[str]:
    """Return the FQNs of the parameters that have a row for each token.

    They are those of the embedding and of the head, including its bias.
    """
    ends = (stock.get_input_embeddings(), stock.get_output_embeddings())
    owned = {id(parameter) for end in ends if end is not None for parameter in end.parameters(recurse=False)}
    return {name for name, parameter in stock.named_parameters(remove_duplicate=False) if id(parameter) in owned}


def enlarge_vocabulary(origins: Mapping[str, LazyTensor], stock: PreTrainedModel) -> dict[str, LazyTensor]:
    """Return the lazy tensors, with rows added to embedding and head if the files have too few.

    A new row is the mean of the rows in the files, so a new token is about as probable as a known
    one.

    Source: https://nlp.stanford.edu/~johnhew/vocab-expansion.html, without the noise, which would
    differ between meshes.
    """
    state = stock.state_dict()
    result = dict(origins)
    for name in names_by_vocabulary(stock) & origins.keys():
        there, wanted = origins[name].shape, state[name].shape
        if there[1:] == wanted[1:] and there[0] < wanted[0]:
            result[name] = LazyTensor(_WithMeanRows(origins[name]), wanted, origins[name].dtype)
    return result


class _WithMeanRows:
    def __init__(self, rows: LazyTensor) -> None:
        self._rows = rows
        self._mean: Tensor | None = None

    def read(self, ranges: Ranges, out: Tensor, reader: BlockReader) -> None:
        first, there = ranges[0], self._rows.shape[0]
        known = max(0, min(first.stop, there) - first.start)
        self._rows.read([slice(first.start, first.start + known), *ranges[1:]], out[:known], reader)
        if known < out.shape[0]:
            if self._mean is None:
                self._mean = _mean_row(self._rows, reader)
            out[known:].copy_(self._mean[tuple(ranges[1:])].expand_as(out[known:]))


def _mean_row(rows: LazyTensor, reader: BlockReader) -> Tensor:
    """Return the mean row in float64, bit-identical on every process.

    Full rows are added pair by pair, because the order of additions in `sum` depends on the number
    of threads.
    """
    total = torch.zeros(rows.shape[1:], dtype=torch.float64)
    for start in range(0, rows.shape[0], _ROWS):
        part = slice(start, min(start + _ROWS, rows.shape[0]))
        block = torch.zeros([_ROWS, *rows.shape[1:]], dtype=torch.float64)
        rows.read([part, *(slice(0, length) for length in rows.shape[1:])], block[: part.stop - part.start], reader)
        while len(block) > 1:
            block = block[: len(block) // 2] + block[len(block) // 2 :]
        total += block[0]
    return total / rows.shape[0]
