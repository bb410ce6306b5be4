"""The ranks of the tests, from one fork server per session that has imported what the tests need.

Each rank of each test would otherwise import the rest again, which takes most of a second.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import meshtrain
from meshtrain.runtime import ranks
from meshtrain.runtime.fork_server import preload
from meshtrain.runtime.ranks import RankError

__all__ = ["RankError", "run_on_ranks"]

# The commands run in other processes, and the corpus package starts threads when it is imported.
_APART = ("__main__", "cli", "corpus")
# Trackers load packages of extras, which start threads too.
_TRACKERS = ("wandb_run", "mlflow_run", "trackio_run")


def _module_names() -> list[str]:
    """Return the names of all modules of meshtrain that a rank may use."""
    root = Path(meshtrain.__path__[0])
    found = sorted(path.relative_to(root).with_suffix("") for path in root.rglob("*.py"))
    return [
        ".".join(("meshtrain", *(part for part in path.parts if part != "__init__")))
        for path in found
        if path.parts[0] not in _APART and path.name not in _TRACKERS
    ]


os.environ.update({"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
preload(
    [
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.llama.modeling_llama",
        "transformers.models.mistral.modeling_mistral",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.qwen3.modeling_qwen3",
        "pytest",
        *_module_names(),
    ]
)


def run_on_ranks(world_size: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Call `fn(*args)` on every rank, like meshtrain.runtime.ranks, and show C++ stacks."""
    return ranks.run_on_ranks(world_size, _with_native_stacks, fn, *args, **options)


def _with_native_stacks(fn: Callable[..., Any], *args: Any) -> Any:
    import torch

    # A gloo thread has no Python stack.
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # noqa: FBT003 - the argument has no name
    return fn(*args)
