"""Handle hooks that a program has registered on its model.

They run in training passes only, not while the model is probed on the meta device.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from meshtrain.compat.nn import hook_tables
from meshtrain.models.copying import copy_module

TorchHook = Callable[..., Any]


@contextmanager
def hooks_disabled(model: nn.Module) -> Iterator[None]:
    """Disable the hooks of a model while the block runs.

    Hooks expect values, which meta tensors do not have. Hooks that the block itself registers stay:
    transformers registers some once, at the first call that asks for hidden states.
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
    """Return whether there is a hook on the module itself; modules inside do not count."""
    return any(hook_tables(module))


def copy_with_hooks(model: PreTrainedModel, shared: Iterable[nn.Module] = ()) -> PreTrainedModel:
    """Return a copy of a model whose hooks still refer to the program's own objects.

    A hook that refers to a part of the model is copied, and then refers to the part of the copy.

    Args:
        model: not changed.
        shared: parts that are not copied. The copy holds the same ones.
    """
    modules = {*model.modules()}
    hooks = (hook for hooks in _all_hooks(model) for hook in hooks.values())
    memo: dict[int, Any] = {id(hook): hook for hook in hooks if not _belongs_to(hook, modules)}
    copied: PreTrainedModel = copy_module(model, memo | {id(it): it for it in shared})
    return copied


def _all_hooks(model: nn.Module) -> Iterator[dict[int, TorchHook]]:
    return (table for module in model.modules() for table in hook_tables(module))


def _belongs_to(hook: TorchHook, modules: Container[nn.Module]) -> bool:
    """Return whether a hook refers to a part of the model, so that a copy needs its own hook."""
    known = [getattr(hook, "__self__", None), *getattr(hook, "args", ()), *getattr(hook, "keywords", {}).values()]
    return any(isinstance(value, nn.Module) and value in modules for value in known)
