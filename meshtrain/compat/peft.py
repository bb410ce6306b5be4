"""peft: methods of one of its objects that would not do what they say for a parallel model."""

from collections.abc import Callable
from typing import Any


def replace_methods(owner: Any, **methods: Callable[..., Any]) -> None:
    """Give one object of peft other methods, for as long as it lives.

    Why: the program keeps the PeftModel and the LoRA layers that it has. peft's own methods would merge or save shards
    as if they were whole.
    Holds: peft 0.21.

    Raises:
        AttributeError: if peft has no such method any more, so that the new one would never be called.
    """
    for name, method in methods.items():
        if not callable(getattr(owner, name)):
            raise AttributeError(f"{name} of {type(owner).__name__} is no method")
        vars(owner)[name] = method


def set_unload(layer: Any, unload: Callable[..., Any]) -> None:
    """Let a layer of peft do something of its own when its adapters are unloaded or merged.

    Why: `PeftModel.unload` and `merge_and_unload` call `unload_and_optionally_merge_module` of a layer that has this
    method, and otherwise take the layer apart by themselves. Most layers do not have it.
    Holds: peft 0.21.
    """
    vars(layer)["unload_and_optionally_merge_module"] = unload
