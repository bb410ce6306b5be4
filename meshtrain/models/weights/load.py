"""Load pretrained weights: every process reads only its own slices of the safetensors files."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.errors import ModelError, name_some
from meshtrain.models.fused import FusedParameter, split_parts
from meshtrain.models.layout import local_ranges, local_tensor
from meshtrain.models.weights.block_reader import BlockReader
from meshtrain.models.weights.hub_layout import Layout, find_layout
from meshtrain.models.weights.lazy_tensor import LazyTensor
from meshtrain.models.weights.operations import Ranges
from meshtrain.models.weights.safetensors_files import find_tensors
from meshtrain.models.whole.folder import half_in_folder
from meshtrain.runtime.agreement import failing_together

# The two ends of a tie are compared in pieces of this size.
_COMPARED_BYTES = 16 * 2**20
# The mean of the known rows is computed from this number of rows at a time.
_ROWS = 1024


@torch.no_grad()
def load_shards(
    parameters: Mapping[str, Tensor],
    source: Path,
    *,
    fused: Sequence[FusedParameter],
    stock: PreTrainedModel,
    enlarge_vocabulary: bool = False,
) -> None:
    """Fill this rank's parameters from safetensors files of a Hugging Face directory. Collective.

    All layouts that transformers' `from_pretrained` reads are supported: that of the modules, and
    older ones in which experts are stored one by one, projections are fused or names differ.
    Besides the parameters, the host holds little more than one tensor of the files at a time.

    Args:
        parameters: FQN -> tensor of this rank, plain or DTensor, on any mesh and device. Values are
            cast to its dtype. The table may contain buffers that the model saves, which are filled
            if the files have them. The ranks together hold the full model.
        source: a local directory with model.safetensors, or with an index and the files that it
            names.
        fused: the stock parameters that are kept in parts.
        stock: the full, unchanged model on meta (`stock_like`). It defines names, shapes and
            conversions.
        enlarge_vocabulary: whether the model may have more tokens than the files. The new rows of
            embedding and head are then set to the mean of the rows in the files.

    Raises:
        ModelError: on all ranks, with the same message, if files are missing or broken, or hold
            another model.
    """
    pinned = any(local_tensor(parameter).device.type == "cuda" for parameter in parameters.values())
    with BlockReader(pinned=pinned) as reader:
        with failing_together(ModelError):
            layout = find_layout_in(source, stock)
            if problems := _problems(source, stock, layout, enlarge_vocabulary=enlarge_vocabulary):
                raise ModelError(problems)
        with failing_together(ModelError):
            lazy_tensors = split_parts(_with_new_rows(layout.tensors, stock), fused)
            _fill(parameters, lazy_tensors, reader)
            if problems := _contradictions(parameters, lazy_tensors, layout.contested, source, reader):
                raise ModelError(problems)


def find_layout_in(source: Path, stock: PreTrainedModel) -> Layout:
    """Find every tensor of a model's state in a folder of this model, or of a multimodal one.

    Raises:
        ModelError: if files are missing or broken, or the model is not part of the multimodal one.
    """
    tensors = find_tensors(source)
    half = half_in_folder(source, stock)
    if half is None:
        return find_layout(stock, tensors)
    layout = find_layout(half.whole, tensors)
    own = {there: name for name, there in half.names.items()}
    return replace(
        layout,
        tensors={name: layout.tensors[there] for name, there in half.names.items() if there in layout.tensors},
        contested={own[copy]: own[of] for copy, of in layout.contested.items() if copy in own and of in own},
    )


def _problems(source: Path, stock: PreTrainedModel, layout: Layout, *, enlarge_vocabulary: bool) -> list[str]:
    """Return one line for each problem of the files; an empty list if they hold the model."""
    misfits, hint = _other_shapes(stock, layout, enlarge_vocabulary=enlarge_vocabulary)
    findings = {
        "lacks weights of the model": layout.missing,
        "holds weights that the model does not have": layout.unexpected,
        "has weights of other shapes": layout.misfits + misfits,
    }
    problems = []
    for what, found in findings.items():
        if unique := list(dict.fromkeys(found)):
            problems.append(f"{source} {what} ({len(unique)}): {name_some(unique)}")
    return [*problems, hint] if problems else []


def _other_shapes(stock: PreTrainedModel, layout: Layout, *, enlarge_vocabulary: bool) -> tuple[list[str], str]:
    texts, only_too_few = [], True
    by_vocabulary = _names_by_vocabulary(stock)
    for name, wanted in stock.state_dict().items():
        if name not in layout.tensors or layout.tensors[name].shape == wanted.shape:
            continue
        found = layout.tensors[name].shape
        too_few = name in by_vocabulary and found[1:] == wanted.shape[1:] and found[0] < wanted.shape[0]
        only_too_few &= too_few
        if not (too_few and enlarge_vocabulary):
            texts.append(f"{name} is {tuple(found)} in the files and {tuple(wanted.shape)} in the model")
    if texts and only_too_few:
        return texts, (
            "the model has more tokens than the files: set model.enlarge_vocabulary = true (in a program: "
            "enlarge_vocabulary=True) to set the new rows to the mean of the known ones"
        )
    return texts, "use the configuration that belongs to these weights, or other weights"


def _fill(parameters: Mapping[str, Tensor], lazy_tensors: Mapping[str, Tensor], reader: BlockReader) -> None:
    for name, tensor in parameters.items():
        lazy = lazy_tensors.get(name)
        if lazy is None:
            assert not isinstance(tensor, nn.Parameter), f"{name} is not a parameter of the stock model"
        else:
            assert isinstance(lazy, LazyTensor)
            assert lazy.shape == tensor.shape, f"{name} is cut by something unknown"
            lazy.read(local_ranges(tensor), local_tensor(tensor), reader)


def _contradictions(
    parameters: Mapping[str, Tensor],
    lazy_tensors: Mapping[str, Tensor],
    contested: Mapping[str, str],
    source: Path,
    reader: BlockReader,
) -> list[str]:
    """Return one line for each tie of the configuration whose two ends differ in the files."""
    problems = []
    for copy, original in contested.items():
        tensor = parameters.get(original, parameters.get(copy))
        other = lazy_tensors[copy if original in parameters else original]
        assert isinstance(other, LazyTensor)
        if tensor is not None and not _is_equal(local_tensor(tensor), other, local_ranges(tensor), reader):
            problems.append(
                f"{source} has different values for {copy} and {original}, but the configuration ties them; "
                "from_pretrained would not tie them: set config.tie_word_embeddings = False "
                "(under model.config in a run file)"
            )
    return problems


def _is_equal(values: Tensor, lazy: LazyTensor, ranges: Sequence[slice], reader: BlockReader) -> bool:
    rows = max(1, _COMPARED_BYTES * len(values) // max(1, values.nbytes))
    for start in range(0, len(values), rows):
        part = values[start : start + rows]
        other = torch.empty_like(part)
        first = ranges[0].start + start
        lazy.read([slice(first, first + len(part)), *ranges[1:]], other, reader)
        if not torch.equal(part, other):
            return False
    return True


def _names_by_vocabulary(stock: PreTrainedModel) -> set[str]:
    """Return the FQNs of the parameters that have a row for each token.

    They are those of the embedding and of the head, including its bias.
    """
    ends = (stock.get_input_embeddings(), stock.get_output_embeddings())
    owned = {id(parameter) for end in ends if end is not None for parameter in end.parameters(recurse=False)}
    return {name for name, parameter in stock.named_parameters(remove_duplicate=False) if id(parameter) in owned}


def _with_new_rows(tensors: Mapping[str, LazyTensor], stock: PreTrainedModel) -> dict[str, LazyTensor]:
    """Return the lazy tensors, with rows added to embedding and head if the files have too few.

    A new row is the mean of the rows in the files, so a new token is about as probable as a known
    one.

    Source: https://nlp.stanford.edu/~johnhew/vocab-expansion.html, without the noise, which would
    differ between meshes.
    """
    state = stock.state_dict()
    result = dict(tensors)
    for name in _names_by_vocabulary(stock) & tensors.keys():
        there, wanted = tensors[name].shape, state[name].shape
        if there[1:] == wanted[1:] and there[0] < wanted[0]:
            result[name] = LazyTensor(_WithMeanRows(tensors[name]), wanted, tensors[name].dtype)
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
