"""meshtrain: train any Hugging Face causal language model on PyTorch's own distributed stack."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshtrain.config.toml import load_plan, load_run

__all__ = ["load_plan", "load_run"]

_HOMES = {"load_plan": "meshtrain.config.toml", "load_run": "meshtrain.config.toml"}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: importing meshtrain costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'meshtrain' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
