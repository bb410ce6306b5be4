"""Dropout in a program: seeded as in a run, without effect on the program's own random numbers."""

from meshtrain.api.handle import Handle
from meshtrain.parallel.randomness import RandomStates, get_random_states, set_random_states


class ProgramStreams:
    """Gives the model its own random streams during a training forward pass.

    The streams are a function of the seed and the number of the pass. Ranks that share a model must
    drop the same elements of what they hold in common, whatever the program has drawn before on
    each rank.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._kept: RandomStates | None = None

    def begin(self) -> None:
        """Save the state of the generators; the hook of the stage then seeds them."""
        self._kept = get_random_states()
        self._handle.pipeline.streams.begin_step(self._handle.num_forwards)
        self._handle.num_forwards += 1

    def end(self) -> None:
        """Restore the program's generators, if they were saved."""
        if self._kept is None:
            return
        kept, self._kept = self._kept, None
        set_random_states(kept)
