"""Dropout in a user's program: seeded as in every run, and the program's own draws go on as if nothing had been."""

import torch
from torch import Tensor

from meshtrain.api.handle import Handle


class ProgramStreams:
    """Around a training forward pass: the model draws from its own streams, a function of (seed, number of the pass).

    Ranks that share a model must drop alike what they hold alike, whatever the program has drawn on each before.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._kept: tuple[Tensor, Tensor | None] | None = None

    def begin(self) -> None:
        """Keep the state of the generators; the stage's own hook seeds them then."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self._kept = torch.get_rng_state(), cuda
        self._handle.pipeline.streams.begin_step(self._handle.num_forwards)
        self._handle.num_forwards += 1

    def end(self) -> None:
        """Give the program its generators back, if they were taken."""
        if self._kept is None:
            return
        cpu, cuda = self._kept
        self._kept = None
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
