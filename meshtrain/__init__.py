"""Train any Hugging Face causal language model on PyTorch's own distributed stack.

The public names are those of `__all__`. Each is loaded at its first use.

api          the public functions for programs with their own training loop
checkpoint   checkpoints and Hugging Face folders: writing, reading, converting, exporting
cli          the command line, one function per command
compat       private interfaces of other libraries that meshtrain uses
config       run, plan and corpus files: reading and checking
corpus       preparation of a text corpus
data         tokens, tokenizers, samples and batches
inference    text generation
models       stock models: building, initialization, structure
parallel     cutting and sharding a model, and its pipeline
pictures     pictures and pages: SVG and HTML
planning     memory, seconds and messages of a run, before it is launched
profiling    what a run really did
runtime      processes, process groups, the watchdog and other services of a run
training     the training loop of a run
tuning       sweeps, and the range of learning rates
verify       proofs that a plan computes what one device computes
console.py   lines, tables and progress bars
errors.py    the exceptions
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshtrain.runtime.garbage_collection import NEVER, rare_collections

if TYPE_CHECKING:
    from meshtrain.api.building import build_mesh, build_model, clip_grad_norm, initialize, load_weights
    from meshtrain.api.checkpoints import load_checkpoint, save_checkpoint
    from meshtrain.api.model import generate
    from meshtrain.api.parallelize import parallelize
    from meshtrain.api.rebind import rebind
    from meshtrain.api.saving import save_parallelized, save_pretrained
    from meshtrain.api.train import train
    from meshtrain.config.toml import load_plan, load_run
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
    "build_mesh": "meshtrain.api.building",
    "build_model": "meshtrain.api.building",
    "clip_grad_norm": "meshtrain.api.building",
    "generate": "meshtrain.api.model",
    "initialize": "meshtrain.api.building",
    "load_checkpoint": "meshtrain.api.checkpoints",
    "load_plan": "meshtrain.config.toml",
    "load_run": "meshtrain.config.toml",
    "load_weights": "meshtrain.api.building",
    "parallelize": "meshtrain.api.parallelize",
    "rebind": "meshtrain.api.rebind",
    "save_checkpoint": "meshtrain.api.checkpoints",
    "save_parallelized": "meshtrain.api.saving",
    "save_pretrained": "meshtrain.api.saving",
    "train": "meshtrain.api.train",
}


def __getattr__(name: str) -> Any:
    """Load a public name at its first use, so that importing meshtrain is cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module 'meshtrain' has no attribute {name!r}; it has {', '.join(__all__)}")
    with rare_collections(NEVER):
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
