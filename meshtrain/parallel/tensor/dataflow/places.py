"""Put the cuts together that are alike: those of layers of one kind, in the same places."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from meshtrain.models.patterns import as_pattern
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.parallel.tensor.dataflow.blocks import Cut
from meshtrain.parallel.tiny_copy import LayerKind, kinds_of_layers


@dataclass(frozen=True)
class Place:
    """Where a module or parameter of a layer is.

    Attributes:
        kind: of the layer.
        pattern: of its name inside the layer, with a dot in front; empty for the layer itself.
    """

    kind: LayerKind
    pattern: str


def places_of(tiny: PreTrainedModel, cuts: Sequence[Cut], projections: Iterable[str]) -> dict[str, Place]:
    """Return name -> place, for everything inside the layers.

    Numbers are replaced in the patterns, as those of experts, unless projections that differ in
    them have different parts in a cut, as those of an `nn.Sequential`.
    """
    layers, _ = find_layers(tiny)
    kinds = kinds_of_layers(tiny)
    parts: dict[str, set[str]] = defaultdict(set)
    for cut in cuts:
        for name in (*cut.columns, *cut.rows):
            parts[as_pattern(name)].add(str(cut.columns.get(name)))
    places = {}
    for name in (f"{layers}.{inside}" for inside in _names(tiny.get_submodule(layers))):
        index, _, inner = name.removeprefix(f"{layers}.").partition(".")
        replaced = as_pattern(f".{inner}") if len(parts[as_pattern(name)]) < 2 else f".{inner}"
        places[name] = Place(kinds[int(index)], replaced if inner else "")
    return places


def _names(layers: nn.Module) -> Iterator[str]:
    yield from (name for name, _ in layers.named_modules() if name)
    yield from (name for name, _ in layers.named_parameters())


def cuts_alike(cuts: Sequence[Cut], places: Mapping[str, Place]) -> Iterator[list[Cut]]:
    """Yield the cuts that are alike, if all projections in the same place are cut so."""
    groups: dict[str, list[Cut]] = defaultdict(list)
    treated: dict[str, set[str]] = defaultdict(set)
    for cut in cuts:
        columns = sorted({f"{places[name]} {parts}" for name, parts in cut.columns.items()})
        group = str((columns, sorted({str(places[name]) for name in cut.rows})))
        groups[group].append(cut)
        for name in (*cut.columns, *cut.rows):
            treated[name].add(group)
    in_place: dict[Place, set[frozenset[str]]] = defaultdict(set)
    for name, place in places.items():
        in_place[place].add(frozenset(treated[name]))
    for same in groups.values():
        if all(len(in_place[places[name]]) == 1 for cut in same for name in (*cut.columns, *cut.rows)):
            yield same
