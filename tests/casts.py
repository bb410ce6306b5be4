"""float64 in the processes of tests, which end with the test."""

from contextlib import ExitStack

from meshtrain.compat.casts import float32_casts_lifted

# Held: a context manager that nobody holds puts back what it has changed.
_UNTIL_THE_END = ExitStack()


def lift_float32_casts() -> None:
    """Do `float32_casts_lifted` for the rest of the process of a rank."""
    _UNTIL_THE_END.enter_context(float32_casts_lifted())
