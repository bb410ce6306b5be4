"""The fork server from which ranks are forked. It imports what they need, once.

This module imports no torch, so that a command can start the server before it imports torch itself.
"""

import multiprocessing
from collections.abc import Iterable
from multiprocessing import forkserver

PRELOAD = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.auto.modeling_auto",
)

CONTEXT = multiprocessing.get_context("forkserver")


def preload(modules: Iterable[str]) -> None:
    """Make the fork server import these modules too. Call it before the first ranks are started."""
    CONTEXT.set_forkserver_preload([*PRELOAD, *modules])


def start(modules: Iterable[str]) -> None:
    """Start the fork server. It imports the modules while this process goes on."""
    preload(modules)
    forkserver.ensure_running()
