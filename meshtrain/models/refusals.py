"""Errors of transformers and torch for a configuration, and their reason in one line."""

from huggingface_hub.errors import StrictDataclassError

from meshtrain.config.problems import shortened

REFUSALS = (ValueError, TypeError, KeyError, AssertionError, StrictDataclassError)
"""What transformers raises for a value of the wrong type, or one that contradicts another."""
FAILURES = (ArithmeticError, LookupError, RuntimeError)
"""What transformers and torch raise when they compute with a value that nothing checked."""
LONGEST_REASON = 600


def refusal_reason(error: Exception) -> str:
    """Return the reason of an error in one line.

    The checks of configuration values store the reason in the cause of the error.
    """
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        return shortened(str(error.__cause__), LONGEST_REASON)
    if isinstance(error, KeyError):
        # Its text is the missing key alone, such as the name of an activation function.
        return shortened(f"it does not know {error}", LONGEST_REASON)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # A first line that ends with a colon introduces the next ones.
    return shortened(" ".join(lines) if lines[0].endswith(":") else lines[0], LONGEST_REASON)
