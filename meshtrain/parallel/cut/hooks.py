"""Hooks that a program has put on its model: heard in its passes, and not while the model is looked at on meta."""

import copy
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from meshtrain.compat.nn import hook_tables

Hook = Callable[..., Any]


@contextmanager
def hooks_set_aside(model: nn.Module) -> Iterator[None]:
    """Call none of a model's hooks while the block runs: they expect numbers, and meta tensors have none.

    What the block itself puts on stays: transformers does so once, at the first call that asks for hidden states.
    """
    kept = [(hooks, dict(hooks)) for hooks in _all_hooks(model)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            new = dict(hooks)
            hooks.clear()
            hooks.update(before | new)


def has_hooks_on_itself(module: nn.Module) -> bool:
    """Whether there is a hook on the module, and not on one inside."""
    return any(hook_tables(module))


def copy_with_hooks(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model, but not the objects that its hooks are methods of: the program looks at the one that it has."""
    modules = {*model.modules()}
    hooks = (hook for hooks in _all_hooks(model) for hook in hooks.values())
    return copy.deepcopy(model, {id(hook): hook for hook in hooks if not _belongs_to(hook, modules)})


def _all_hooks(model: nn.Module) -> Iterator[dict[int, Hook]]:
    return (table for module in model.modules() for table in hook_tables(module))


def _belongs_to(hook: Hook, modules: Container[nn.Module]) -> bool:
    """Tell whether a hook knows a part of the model, and must know that of the copy."""
    known = [getattr(hook, "__self__", None), *getattr(hook, "args", ()), *getattr(hook, "keywords", {}).values()]
    return any(isinstance(value, nn.Module) and value in modules for value in known)
