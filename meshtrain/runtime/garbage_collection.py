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
NEVER = 0


@contextmanager
def rare_collections(threshold: int = RARELY) -> Iterator[None]:
    """Collect garbage rarely: for a block that mostly creates what stays.

    Args:
        threshold: so many more objects than before let the collector look; NEVER is for an import alone.
    """
    before = gc.get_threshold()
    gc.set_threshold(threshold, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        _take_for_old()


def _take_for_old() -> None:
    """Let what there is now count as looked at: there is so much new that the next look would be at everything."""
    # Who has frozen objects wants them to stay so.
    if gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()


def freeze_objects() -> None:
    """Let the collector never again look at what there is now; `gc.unfreeze` lets it."""
    gc.collect()
    gc.freeze()
