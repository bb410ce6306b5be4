"""Dropout in a program: seeded as in a run, without effect on the program's own random numbers."""

import torch
from torch import Tensor

from meshtrain.api.handle import Handle


class ProgramStreams:
    """Gives the model its own random streams during a training forward pass.

    The streams are a function of the seed and the number of the pass. Ranks that share a model must
    drop the same elements of what they hold in common, whatever the program has drawn before on
    each rank.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._kept: tuple[Tensor, Tensor | None] | None = None

    def begin(self) -> None:
        """Save the state of the generators; the hook of the stage then seeds them."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self._kept = torch.get_rng_state(), cuda
        self._handle.pipeline.streams.begin_step(self._handle.num_forwards)
        self._handle.num_forwards += 1

    def end(self) -> None:
        """Restore the program's generators, if they were saved."""
        if self._kept is None:
            return
        cpu, cuda = self._kept
        self._kept = None
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
