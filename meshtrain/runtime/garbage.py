"""Python's garbage collector walks through all objects there are, and a training creates hundreds of thousands that
stay. It would take a fifth of the time of every start, and a quarter of a second of a step now and then, on each rank
in another one, for which all others wait.

Source: what mypy does at its start; `gc.freeze` of Python's manual.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = 100_000
"""So many more objects than before let the collector look; it would be 700."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely: for a block that mostly creates what stays, as an import does."""
    before = gc.get_threshold()
    gc.set_threshold(RARELY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def set_aside() -> None:
    """Let the collector never again look at what there is now; `gc.unfreeze` lets it."""
    gc.collect()
    gc.freeze()
