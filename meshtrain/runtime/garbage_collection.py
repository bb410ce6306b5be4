"""Run Python's garbage collector rarely.

The collector walks through all existing objects, and a training creates hundreds of thousands that
stay. It would take a fifth of the time of every start. It would also take a quarter of a second of
some steps, in a different step on each rank, and all other ranks would wait.

Source: what mypy does at its start; `gc.freeze` in Python's manual.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = 100_000
"""Number of new objects that triggers a garbage collection. Python's default is 700."""
NEVER = 0


@contextmanager
def rare_collections(threshold: int = RARELY) -> Iterator[None]:
    """Run garbage collections rarely, for a block that mostly creates objects that stay.

    Args:
        threshold: number of new objects that triggers a garbage collection. NEVER is for an import
            alone.
    """
    before = gc.get_threshold()
    gc.set_threshold(threshold, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        _age_objects()


def _age_objects() -> None:
    """Move all existing objects into the collector's oldest generation.

    There are so many new objects that the next collection would otherwise inspect all of them.
    """
    # `gc.unfreeze` would also release objects that the caller has frozen.
    if gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()


@contextmanager
def frozen_objects_released() -> Iterator[None]:
    """Include in garbage collection again, after the block, what `freeze_objects` has excluded.

    Objects that the caller has frozen before stay frozen.
    """
    is_frozen_by_caller = gc.get_freeze_count() > 0
    try:
        yield
    finally:
        if not is_frozen_by_caller:
            gc.unfreeze()


def freeze_objects() -> None:
    """Exclude all existing objects from garbage collection.

    Do nothing if objects are frozen already, because Python can only release all of them at once.
    """
    if gc.get_freeze_count() == 0:
        gc.collect()
        gc.freeze()
