"""Run only two layers of each kind on the meta device, where results have no values."""

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from meshtrain.compat.autograd import memory_of
from meshtrain.compat.nn import own_forward, restore_forward, set_forward
from meshtrain.parallel.cut.nest import Path, map_nest, tensors_with_paths

LAYERS_OF_A_KIND = 2


@contextmanager
def two_layers_of_each_kind(layers: Sequence[nn.Module], used: set[int], sources: Container[int]) -> Iterator[None]:
    """Run only the first two layers of each kind while the block runs.

    The second would show that a layer uses what another has computed, behind the back of its
    arguments. The others return tensors of the same shapes. A layer that does anything else than
    compute new tensors always runs: it may write into a mapping that layers share. So does one that
    leaves out some of what other layers have computed, since the next one may leave out something
    else.

    Args:
        layers: on the meta device.
        used: memory whose values the running layer has used. It is read after a layer that ran, and
            extended for the others.
        sources: memory of what parts have computed.
    """
    before = [own_forward(layer) for layer in layers]
    run = _Runner(layers, used, sources)
    for index, layer in enumerate(layers):
        set_forward(layer, partial(run, index, layer.forward))
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            restore_forward(layer, forward)


class _Runner:
    def __init__(self, layers: Sequence[nn.Module], used: set[int], sources: Container[int]) -> None:
        self._kinds, self._used, self._sources = kinds_of(layers), used, sources
        self._runs: Counter[tuple[Any, Any]] = Counter()
        self._known: dict[tuple[Any, Any], tuple[Any, list[Path]]] = {}

    def __call__(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inputs = dict(tensors_with_paths((args, kwargs)))
        signature = tuple((path, tensor.shape, tensor.dtype) for path, tensor in inputs.items())
        key = self._kinds[index], signature
        self._runs[key] += 1
        if self._runs[key] > LAYERS_OF_A_KIND and key in self._known:
            result, used = self._known[key]
            self._used.update(memory_of(inputs[path]) for path in used)
            return map_nest(lambda path, tensor: torch.empty_like(tensor), result)
        result = forward(*args, **kwargs)
        given = {memory_of(tensor) for tensor in inputs.values()}
        is_new = all(memory_of(tensor) not in given for _, tensor in tensors_with_paths(result))
        uses_all = all(memory in self._used or memory not in self._sources for memory in given)
        if is_new and uses_all and [*inputs] == [path for path, _ in tensors_with_paths((args, kwargs))]:
            self._known[key] = result, [path for path, tensor in inputs.items() if memory_of(tensor) in self._used]
        return result


def kinds_of(layers: Sequence[nn.Module]) -> list[Any]:
    """Return for each layer what decides how it computes: modules, shapes and plain attributes."""
    tables = [dict(_attributes(layer)) for layer in layers]
    values: dict[Any, list[Any]] = defaultdict(list)
    for table in tables:
        for attribute, value in table.items():
            values[attribute].append(value)
    # An attribute that no two layers share is the index of the layer, or made from it.
    shared = {attribute for attribute, found in values.items() if len(found) == 1 or len({*found}) < len(found)}
    return [
        frozenset((attribute, value) for attribute, value in table.items() if attribute in shared) for table in tables
    ]


def _attributes(layer: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    for name, module in layer.named_modules():
        yield (name, "class"), type(module)
        for kind, parameter in module.named_parameters(recurse=False):
            yield (name, kind), parameter.shape
        for attribute, value in vars(module).items():
            if isinstance(value, str | int | float | None):
                yield (name, attribute), value
