"""Which weights a class reads itself, and not through the module that has them."""

import ast
import functools
import inspect
from collections.abc import Callable
from pathlib import Path

from torch import nn

# What a weight in another form still tells.
_HARMLESS = ("dtype", "device")


def weights_read_by(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names of the modules of a class whose weights its code reads.

    Why: no class declares it, and a tiny copy shows only what runs on a CPU. Some code runs only on
    a GPU, or with a package that is installed there, such as `self.dt_proj.weight @ time_step` of
    Mamba. So the source is read.
    Holds: transformers 5.17 to 5.23.
    """
    # What this package mixes in has no source of its own, and torch's classes read their own.
    bases = [it for it in kind.__mro__ if it.__module__.partition(".")[0] not in ("builtins", "meshtrain", "torch")]
    functions = [it for base in bases for it in vars(base).values() if inspect.isfunction(it)]
    # What a decorator has generated has no file.
    written = [it for it in map(inspect.unwrap, functions) if Path(it.__code__.co_filename).exists()]
    return frozenset().union(*map(_read_in, written))


@functools.cache
def _read_in(function: Callable[..., object]) -> frozenset[str]:
    source = inspect.getsource(function)
    # Methods are indented. A line of text in one may not be, so they stay as they are.
    nodes = [*ast.walk(ast.parse(f"if True:\n{source}" if source[0].isspace() else source))]
    harmless = {id(it.value) for it in nodes if isinstance(it, ast.Attribute) and it.attr in _HARMLESS}
    found = set()
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=name), attr="weight"):
                if id(node) not in harmless:
                    found.add(name)
    return frozenset(found)
