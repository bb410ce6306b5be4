"""Divide features into blocks that do not mix: heads, groups of heads, channels.

A cut is one or more projections whose inputs fall into blocks (rows), and the projections before
them whose outputs fall into the same blocks (columns).
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshtrain.parallel.tensor.dataflow.reach import Reach

SHARED, UNUSED, ELSEWHERE = -1, -2, -3
KINDS: dict[int, Literal["shared", "whole"]] = {SHARED: "shared", ELSEWHERE: "whole"}


@dataclass(frozen=True)
class Part:
    """Consecutive output features of a projection.

    Attributes:
        width: number of features.
        kind: `cut`: they fall into the blocks in order. `shared`: each reaches several blocks.
            `whole`: something else uses them, and no block.
    """

    width: int
    kind: Literal["cut", "shared", "whole"]


@dataclass(frozen=True)
class Cut:
    """Projections that can be divided among processes together.

    Attributes:
        blocks: number of blocks.
        columns: projection -> its outputs, in order.
        rows: projections whose inputs are in blocks.
        parameters: parameter with elements of each block -> the dimension that falls into blocks,
            None if there is none.
    """

    blocks: int
    columns: dict[str, tuple[Part, ...]]
    rows: tuple[str, ...]
    parameters: dict[str, int | None]

    def contains_projection(self, name: str) -> bool:
        """Return whether a projection of the cut is inside a module."""
        return any(projection.startswith(f"{name}.") for projection in (*self.columns, *self.rows))

    def owner_of(self, parameter: str) -> str:
        """Return the module that computes with a parameter.

        That is its own module if a projection is inside, else the largest one around it without a
        projection: norms of single heads are in a list, in a module for all heads.
        """
        owner = parameter.rpartition(".")[0]
        if self.contains_projection(owner):
            return owner
        while not self.contains_projection(around := owner.rpartition(".")[0]) and around:
            owner = around
        return owner


def find_cuts(reached: Mapping[str, Reach], outside: Mapping[str, Tensor], ways: int) -> Iterator[Cut]:
    """Yield the cuts of a model.

    Args:
        reached: projection -> what reaches its inputs.
        outside: projection -> (outputs) bool: the features that something else than the inputs of
            projections uses.
        ways: divides the number of blocks.
    """
    columns, rows = set[str](), set[str]()
    for cluster in _clusters(reached):
        cut = _cut(cluster, reached, outside, ways)
        # A projection is cut by its outputs or by its inputs. In a chain of three, the first two
        # are cut together.
        if cut is not None and not rows & cut.columns.keys() and not columns & {*cut.rows}:
            columns |= cut.columns.keys()
            rows |= {*cut.rows}
            yield cut


def _clusters(reached: Mapping[str, Reach]) -> list[list[str]]:
    """Return the projections whose inputs some feature reaches together."""
    owner: dict[tuple[str, int], str] = {}
    root = {name: name for name in reached}

    def find(name: str) -> str:
        while root[name] != name:
            name = root[name]
        return name

    for name, reach in reached.items():
        for source, hits in reach.outputs.items():
            for feature in hits.any(1).nonzero().flatten().tolist():
                root[find(name)] = find(owner.setdefault((source, feature), name))
    clusters: dict[str, list[str]] = defaultdict(list)
    for name, reach in reached.items():
        if reach.outputs:
            clusters[find(name)].append(name)
    return [*clusters.values()]


def _cut(rows: Sequence[str], reached: Mapping[str, Reach], outside: Mapping[str, Tensor], ways: int) -> Cut | None:
    widths = [reached[name].inputs for name in rows]
    sources = dict.fromkeys(source for name in rows for source in reached[name].outputs)
    if set(sources) & set(rows):
        return None
    hits = {source: joined_hits(source, rows, reached) for source in sources}
    if any((hit.any(1) & outside[source]).any() for source, hit in hits.items()):
        return None
    elsewhere = {source: _used_elsewhere(source, rows, reached) | outside[source] for source in sources}
    every = torch.cat([*hits.values()])
    counts = every.sum(1)
    for chosen in _choices(counts):
        blocks = _blocks(every[chosen])
        number = int(blocks.max()) + 1
        if number < 2 or number % ways or not all(_is_even(part, number) for part in blocks.split(widths)):
            continue
        labels = {source: _labels(hit, blocks) for source, hit in hits.items()}
        for source in sources:
            labels[source][elsewhere[source] & (labels[source] == UNUSED)] = ELSEWHERE
        columns = {source: _parts(each, number) for source, each in labels.items()}
        found = {source: parts for source, parts in columns.items() if parts is not None}
        if len(found) == len(columns) and any(part.kind == "cut" for parts in found.values() for part in parts):
            return Cut(number, found, tuple(rows), dict(_parameters(rows, reached, blocks, number)))
    return None


def _choices(counts: Tensor) -> Iterator[Tensor]:
    """Yield (features) bool: which features decide about the blocks.

    A feature that reaches more inputs than others may be shared by all blocks, as a key is that all
    heads use. So may one that reaches fewer: a value that all heads use reaches one input of each.
    """
    found = sorted({count for count in counts.tolist() if count}, reverse=True)
    yield from (counts <= most for most in found)
    yield from (counts == count for count in found)


def joined_hits(source: str, rows: Sequence[str], reached: Mapping[str, Reach]) -> Tensor:
    """Return (outputs of the source, inputs of all rows) bool."""
    width = next(reached[name].outputs[source].shape[0] for name in rows if source in reached[name].outputs)
    none = {name: torch.zeros(width, reached[name].inputs, dtype=torch.bool) for name in rows}
    return torch.cat([reached[name].outputs.get(source, none[name]) for name in rows], 1)


def _used_elsewhere(source: str, rows: Sequence[str], reached: Mapping[str, Reach]) -> Tensor:
    """Return (outputs of the source) bool: whether other projections use a feature."""
    found = [reach.outputs[source] for name, reach in reached.items() if name not in rows and source in reach.outputs]
    if not found:
        return torch.zeros((), dtype=torch.bool)
    return torch.stack([hits.any(1) for hits in found]).any(0)


def _blocks(hits: Tensor) -> Tensor:
    """Return the block of each input: inputs that one feature reaches are in one block.

    Args:
        hits: (features, inputs) bool.

    Returns:
        (inputs) int, numbered in the order of the inputs; `UNUSED` for inputs that nothing reaches.
        Where each block is one input, an input that nothing reaches, as behind a ReLU, is one too.
    """
    blocks = torch.full(hits.shape[1:], UNUSED)
    number = 0
    for start in range(hits.shape[1]):
        if blocks[start] != UNUSED or not hits[:, start].any():
            continue
        block = torch.zeros(hits.shape[1], dtype=torch.bool)
        block[start] = True
        while True:
            wider = hits[(hits & block).any(1)].any(0) | block
            if torch.equal(wider, block):
                break
            block = wider
        blocks[block] = number
        number += 1
    return torch.arange(len(blocks)) if number == int((blocks != UNUSED).sum()) else blocks


def _is_even(labels: Tensor, blocks: int) -> bool:
    """Return whether features fall into all blocks, in order and in equal numbers."""
    if len(labels) % blocks:
        return False
    expected = torch.arange(blocks).repeat_interleave(len(labels) // blocks)
    return bool(((labels == expected) | (labels == UNUSED)).all())


def _labels(hit: Tensor, blocks: Tensor) -> Tensor:
    """Return the block that each feature reaches, `SHARED` for several, `UNUSED` for none."""
    labels = torch.full(hit.shape[:1], UNUSED)
    for index, row in enumerate(hit):
        touched = blocks[row].unique()
        if len(touched):
            labels[index] = touched[0] if len(touched) == 1 else SHARED
    return labels


def _parts(labels: Tensor, blocks: int) -> tuple[Part, ...] | None:
    """Return the parts of a projection's outputs; None if a part has not all blocks in order."""
    parts = []
    for part in labels.tensor_split(_bounds(labels)):
        kind = next((KINDS[label] for label in part.tolist() if label in KINDS), None)
        if kind is None and not _is_even(part, blocks):
            return None
        parts.append(Part(len(part), kind or "cut"))
    return tuple(parts)


def _bounds(labels: Tensor) -> list[int]:
    """Return where a new part begins: the blocks begin again, or the kind is another."""
    used = [(index, label) for index, label in enumerate(labels.tolist()) if label != UNUSED]
    return [
        index
        for (_, before), (index, label) in itertools.pairwise(used)
        if label < before or (label != before and (label in KINDS or before in KINDS))
    ]


def _parameters(
    rows: Sequence[str], reached: Mapping[str, Reach], blocks: Tensor, number: int
) -> Iterator[tuple[str, int | None]]:
    """Yield each parameter that blocks have elements of their own in, and the dimension of these.

    The dimension is None if no dimension falls into the blocks.
    """
    widths = [reached[name].inputs for name in rows]
    for p in dict.fromkeys(p for name in rows for p in reached[name].parameters):
        found = [reached[name].parameters.get(p) for name in rows]
        sizes = next([len(hits) for hits in dims] for dims in found if dims is not None)
        own = False
        for dim, size in enumerate(sizes):
            none = [torch.zeros(size, width, dtype=torch.bool) for width in widths]
            hits = [zeros if dims is None else dims[dim] for dims, zeros in zip(found, none, strict=True)]
            labels = _labels(torch.cat(hits, 1), blocks)
            own = own or bool((labels >= 0).any())
            if size > 1 and _is_even(labels, number) and (labels >= 0).any():
                yield p, dim
                break
        else:
            if own:
                yield p, None
