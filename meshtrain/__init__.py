"""meshtrain: train any Hugging Face causal language model on PyTorch's own distributed stack."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshtrain.runtime.garbage import NEVER, rare_collections

if TYPE_CHECKING:
    from meshtrain.config.toml import load_plan, load_run
    from meshtrain.library.generation import generate
    from meshtrain.library.parallelize import parallelize
    from meshtrain.library.pieces import build_mesh, build_model, clip_grad_norm, initialize, load_weights
    from meshtrain.library.rebind import rebind
    from meshtrain.library.saving import save_parallelized, save_pretrained
    from meshtrain.library.state import load_checkpoint, save_checkpoint
    from meshtrain.library.train import train
    from meshtrain.training.hooks import Hook
    from meshtrain.training.state import TrainState

__all__ = [
    "Hook",
    "TrainState",
    "build_mesh",
    "build_model",
    "clip_grad_norm",
    "generate",
    "initialize",
    "load_checkpoint",
    "load_plan",
    "load_run",
    "load_weights",
    "parallelize",
    "rebind",
    "save_checkpoint",
    "save_parallelized",
    "save_pretrained",
    "train",
]

_HOMES = {
    "Hook": "meshtrain.training.hooks",
    "TrainState": "meshtrain.training.state",
    "build_mesh": "meshtrain.library.pieces",
    "build_model": "meshtrain.library.pieces",
    "clip_grad_norm": "meshtrain.library.pieces",
    "generate": "meshtrain.library.generation",
    "initialize": "meshtrain.library.pieces",
    "load_checkpoint": "meshtrain.library.state",
    "load_plan": "meshtrain.config.toml",
    "load_run": "meshtrain.config.toml",
    "load_weights": "meshtrain.library.pieces",
    "parallelize": "meshtrain.library.parallelize",
    "rebind": "meshtrain.library.rebind",
    "save_checkpoint": "meshtrain.library.state",
    "save_parallelized": "meshtrain.library.saving",
    "save_pretrained": "meshtrain.library.saving",
    "train": "meshtrain.library.train",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: importing meshtrain costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'meshtrain' has no attribute {name!r}; it has {', '.join(__all__)}")
    with rare_collections(NEVER):
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
