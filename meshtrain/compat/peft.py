"""peft: methods of its objects that would be wrong for a parallel model."""

from collections.abc import Callable
from typing import Any


def replace_methods(owner: Any, **methods: Callable[..., Any]) -> None:
    """Replace methods of one object of peft permanently.

    Why: the program keeps its PeftModel and LoRA layers, whose own methods would merge or save
    shards as if they were full tensors.
    Holds: peft 0.21.

    Raises:
        AttributeError: if peft no longer has such a method, so that the new one would never be
            called.
    """
    for name, method in methods.items():
        if not callable(getattr(owner, name)):
            raise AttributeError(f"{name} of {type(owner).__name__} is not a method")
        vars(owner)[name] = method


def set_unload(layer: Any, unload: Callable[..., Any]) -> None:
    """Let a layer of peft do something of its own when its adapters are unloaded or merged.

    Why: `PeftModel.unload` and `merge_and_unload` call `unload_and_optionally_merge_module` of a
    layer that has this method, and otherwise replace the layer by themselves. Most layers do not
    have it.
    Holds: peft 0.21.
    """
    vars(layer)["unload_and_optionally_merge_module"] = unload
