"""meshtrain with a fault: `torchrun faulty.py FAULT RANK STEP MICROBATCH train run.toml`.

FAULT is what the rank does before the forward pass of the microbatch (from 0) of the step (from
1): `raise`, `sleep`, `freeze` (SIGSTOP), `kill`, `leave` (end silently); or, before all
microbatches, `mistake` (a UserError on one rank). It strikes once: a restart of torchrun succeeds.
"""

import os
import signal
import sys
import time
from typing import Any

from torch import nn

from meshtrain import cli
from meshtrain.errors import DataError
from meshtrain.runtime.environment import rank_from_environment
from meshtrain.training import loop

FAULT, RANK, STEP, MICROBATCH = sys.argv[1], *map(int, sys.argv[2:5])


def strike() -> None:
    """Do what FAULT names."""
    sys.stderr.write(f"FAULT {FAULT} at {time.time()}\n")
    if FAULT == "raise":
        raise ValueError("the fault of the test")
    if FAULT == "sleep":
        time.sleep(600)
    if FAULT == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(7)


def faulty_step(context: Any, step: int, *args: Any) -> Any:
    """Set the fault up, then run the step."""
    if (rank_from_environment(), step + 1) == (RANK, STEP) and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        if FAULT == "mistake":
            sys.stderr.write(f"FAULT {FAULT} at {time.time()}\n")
            raise DataError("a file of this machine is broken; fix it")
        seen: list[nn.Module] = []

        def before_forward(module: nn.Module, _: Any) -> None:
            seen.append(module)
            if len(seen) == MICROBATCH + 1:
                strike()

        context.pipeline.stages[0].model.register_forward_pre_hook(before_forward)
    return true_step(context, step, *args)


if __name__ == "__main__":
    true_step, loop.train_step = loop.train_step, faulty_step
    del sys.argv[1:5]
    cli.main()
