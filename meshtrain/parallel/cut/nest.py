"""Read and replace the tensors in the arguments and results of a module, by their paths."""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

Path = tuple[Any, ...]
"""The keys and indices that lead to one tensor of a nest, the outermost first."""


def tensors_with_paths(nest: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield the path and value of every tensor in a nest of tuples, lists and mappings."""
    if isinstance(nest, Tensor):
        yield path, nest
    elif isinstance(nest, Mapping):
        for key, value in nest.items():
            yield from tensors_with_paths(value, (*path, key))
    elif isinstance(nest, tuple | list):
        for index, value in enumerate(nest):
            yield from tensors_with_paths(value, (*path, index))


def with_tensor(nest: Any, path: Path, tensor: Tensor) -> Any:
    """Return a nest with one tensor replaced.

    A mapping is changed in place, because layers share it. It gets the key if it has none, with a
    tuple if the path goes on. Tuples and lists are copied.
    """
    if not path:
        return tensor
    key, *rest = path
    if isinstance(nest, MutableMapping):
        nest[key] = with_tensor(nest.get(key), tuple(rest), tensor)
        return nest
    items = list(nest or ())
    items += [None] * (key + 1 - len(items))
    items[key] = with_tensor(items[key], tuple(rest), tensor)
    return _like(nest, items)


def _like(nest: Any, items: Sequence[Any]) -> Any:
    if hasattr(nest, "_fields"):
        return type(nest)(*items)
    return tuple(items) if nest is None else type(nest)(items)


def map_nest(function: Callable[[Path, Tensor], Any], nest: Any, path: Path = ()) -> Any:
    """Return a copy of a nest with `function(path, tensor)` in the place of every tensor."""
    if isinstance(nest, Tensor):
        return function(path, nest)
    if isinstance(nest, Mapping):
        mapped = copy.copy(nest)
        for key, value in nest.items():
            mapped[key] = map_nest(function, value, (*path, key))  # type: ignore[index]
        return mapped
    if isinstance(nest, tuple | list):
        return _like(nest, [map_nest(function, value, (*path, index)) for index, value in enumerate(nest)])
    return nest
