"""float64 without casts in the processes of tests, until they end."""

from contextlib import ExitStack

from meshtrain.compat.casts import float32_casts_lifted

# The stack is kept, because a context manager that is collected restores what it has changed.
_UNTIL_THE_END = ExitStack()


def lift_float32_casts() -> None:
    """Apply `float32_casts_lifted` until this rank's process ends."""
    _UNTIL_THE_END.enter_context(float32_casts_lifted())
