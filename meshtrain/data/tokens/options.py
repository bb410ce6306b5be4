"""The words of commands for what a run file calls otherwise."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from meshtrain.errors import DataError

OPTIONS = {
    'data.on_bad_record = "skip"': "--on-bad-record skip",
    "data.text_key": "--text-key",
    "as data.tokenizer.path": "as --tokenizer",
    "data.validation = ": "--validation ",
    "set data.validation to files of its own, or to 0": "leave --validation out",
}
"""By the keys of a run file that mean the same."""


_are_told: ContextVar[bool] = ContextVar("_are_told", default=False)


@contextmanager
def with_option_names() -> Iterator[None]:
    """Name the options of a command where a problem, or a warning `with_names_shown`, names the keys of a run file."""
    before = _are_told.set(True)
    try:
        yield
    except DataError as error:
        raise DataError([with_names_shown(line) for line in error.lines]) from error
    finally:
        _are_told.reset(before)


def with_names_shown(text: str) -> str:
    """Return a text with the words of who reads it: options of a command, or else keys of a run file."""
    if _are_told.get():
        for key, option in OPTIONS.items():
            text = text.replace(key, option)
    return text
