"""Checks of the arguments that a program passes to a public function, with one line per error.

Each check takes the name of the argument as "function: argument", and the kind of error that the
function raises.
"""

import os
from collections.abc import Sequence
from numbers import Integral
from typing import SupportsFloat

from meshtrain.config.problems import shortened
from meshtrain.errors import ConfigError, UserError


def wrong(asked: str, given: object, wanted: str, kind: type[UserError] = ConfigError) -> UserError:
    """Return the error that names what was passed, and what to pass instead."""
    return kind(f"{asked} is {described(given)}", f"pass {wanted}")


def described(given: object) -> str:
    """Return a short description of a value: the value itself, if it is a simple one."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if isinstance(given, str):
        return f"the string {shortened(repr(given))}"
    if given is None or isinstance(given, (bool, int, float, bytes)):
        return shortened(repr(given))
    name = type(given).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def whole_number(
    asked: str, given: object, kind: type[UserError] = ConfigError, *, least: int | None = None, wanted: str = ""
) -> int:
    """Return an integer of Python or of numpy as one of Python.

    Args:
        asked: function and argument.
        given: the value.
        kind: of the error.
        least: the smallest allowed value; None: no limit.
        wanted: description of the expected value, if not a whole number.

    Raises:
        kind: for anything else, `True` included.
    """
    is_whole = isinstance(given, Integral) and not isinstance(given, bool)
    if is_whole and (least is None or int(given) >= least):  # type: ignore[call-overload]
        return int(given)  # type: ignore[call-overload]
    raise wrong(asked, given, (wanted or "a whole number") + ("" if least is None else f" from {least}"), kind)


def positive_number(
    asked: str, given: object, kind: type[UserError] = ConfigError, *, wanted: str = "a number above 0"
) -> float:
    """Return a number above 0: of Python, of numpy, or a tensor with one element. It may be `inf`.

    Raises:
        kind: for anything else, NaN and `True` included.
    """
    if isinstance(given, SupportsFloat) and not isinstance(given, bool):
        try:
            number = float(given)
        except (TypeError, ValueError, RuntimeError):
            number = 0.0
        if number > 0:
            return number
    raise wrong(asked, given, wanted, kind)


def check_flag(asked: str, given: object, kind: type[UserError] = ConfigError) -> None:
    """Check that a value is `True` or `False`; the string "no" would count as true.

    Raises:
        kind: if not.
    """
    if not isinstance(given, bool):
        raise wrong(asked, given, "True or False", kind)


def path_text(asked: str, given: object, kind: type[UserError] = ConfigError, *, wanted: str = "a path") -> str:
    """Return a path as a string.

    Raises:
        kind: if it is not a path. An empty string is refused too: it would be the current
            directory.
    """
    path = os.fspath(given) if isinstance(given, os.PathLike) else given
    if isinstance(path, str) and path:
        return path
    raise wrong(asked, given, wanted, kind)


def check_strings(asked: str, given: object, wanted: str, kind: type[UserError] = ConfigError) -> None:
    """Check that a value is a list of strings. A string alone is refused, as a sequence of letters.

    Raises:
        kind: if not.
    """
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise wrong(asked, given, wanted, kind)
    for index, entry in enumerate(given):
        if not isinstance(entry, str):
            raise wrong(f"{asked}[{index}]", entry, "a string", kind)
