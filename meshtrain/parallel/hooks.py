"""Hooks that a program has put on its model: heard in its passes, and not while the model is looked at on meta."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
Hook = Callable[..., Any]


@contextmanager
def hooks_set_aside(model: nn.Module) -> Iterator[None]:
    """Call none of a program's hooks while the block runs: they expect numbers, and meta tensors have none."""
    kept = [(vars(module), kind, vars(module)[kind]) for module in model.modules() for kind in KINDS]
    for values, kind, hooks in kept:
        values[kind] = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_of_program(hook))
    try:
        yield
    finally:
        for values, kind, hooks in kept:
            values[kind] = hooks


def has_hooks_on_itself(model: nn.Module) -> bool:
    """Whether a program's hook is on the model, and not on a module inside."""
    return any(_is_of_program(hook) for kind in KINDS for hook in vars(model)[kind].values())


def copy_with_hooks(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model, but not the objects that its hooks are methods of: the program looks at the one that it has."""
    modules = {*model.modules()}
    hooks = (hook for module in modules for kind in KINDS for hook in vars(module)[kind].values())
    return copy.deepcopy(model, {id(hook): hook for hook in hooks if not _belongs_to(hook, modules)})


def _is_of_program(hook: Hook) -> bool:
    # transformers collects hidden states and the like by hooks that it puts on once.
    return not str(getattr(hook, "__module__", "")).startswith("transformers.")


def _belongs_to(hook: Hook, modules: Container[nn.Module]) -> bool:
    """Tell whether a hook knows a part of the model, and must know that of the copy."""
    known = [getattr(hook, "__self__", None), *getattr(hook, "args", ()), *getattr(hook, "keywords", {}).values()]
    return any(isinstance(value, nn.Module) and value in modules for value in known)
