"""Which weights a class reads itself, and not through the module that has them."""

import ast
import functools
import inspect
import textwrap
from pathlib import Path

from torch import nn

# What a weight in another form still tells.
_HARMLESS = ("dtype", "device")


@functools.cache
def weights_read_by(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names of the modules of a class whose weights its code reads.

    Its source is read, because some code runs only on a GPU, or with a package that is installed
    there. An example is `self.dt_proj.weight @ time_step` of Mamba.
    """
    found: set[str] = set()
    for base in kind.__mro__:
        # What this package mixes in has no source of its own, and torch's classes read their own.
        if issubclass(base, nn.Module) and base.__module__.partition(".")[0] not in ("meshtrain", "torch"):
            for function in vars(base).values():
                # What a decorator has generated has no file.
                if inspect.isfunction(function) and Path(function.__code__.co_filename).exists():
                    found |= _read_in(inspect.unwrap(function))
    return frozenset(found)


def _read_in(function: object) -> set[str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body  # type: ignore[arg-type]
    nodes = [*ast.walk(definition)]
    harmless = {id(it.value) for it in nodes if isinstance(it, ast.Attribute) and it.attr in _HARMLESS}
    found = set()
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=name), attr="weight"):
                if id(node) not in harmless:
                    found.add(name)
    return found
