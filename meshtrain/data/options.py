"""The words of commands for what a run file calls otherwise."""

from collections.abc import Iterator
from contextlib import contextmanager

from meshtrain.errors import DataError

OPTIONS = {
    'data.on_bad_record = "skip"': "--on-bad-record skip",
    "data.text_key": "--text-key",
    "as data.tokenizer.path": "as --tokenizer",
    "data.validation = ": "--validation ",
    "set data.validation to files of its own, or to 0": "leave --validation out",
}
"""By the keys of a run file that mean the same."""


@contextmanager
def told_as_options() -> Iterator[None]:
    """Name the options of a command where a problem names the keys of a run file."""
    try:
        yield
    except DataError as error:
        problems = list(error.problems)
        for key, option in OPTIONS.items():
            problems = [problem.replace(key, option) for problem in problems]
        raise DataError(problems) from error
