"""Rules for the text of a path, which hold whether or not there is such a file."""

import unicodedata
from difflib import get_close_matches
from typing import Annotated

from pydantic import AfterValidator

from meshtrain.errors import ConfigError, Problem

# In bytes, on every file system of Linux and macOS.
LONGEST_NAME, LONGEST_PATH = 255, 4096
_FEW = 40


def path_problem(path: str) -> Problem | None:
    """Return what is wrong with the text of a path or URL; None if it is valid."""
    for letter in path:
        # A lone surrogate stands for a byte that is not UTF-8, which no configuration can hold.
        if unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp"):
            return Problem(f"{_few(path)} has the character {letter!r}, which no path should have", "remove it")
    if "://" in path:
        return _scheme_problem(path)
    longest = max(path.split("/"), key=lambda name: len(name.encode()))
    if len(longest.encode()) > LONGEST_NAME:
        size = len(longest.encode())
        found = f"{_few(longest)} has {size:,} bytes, and a file name has at most {LONGEST_NAME}"
        return Problem(found, "choose a shorter one")
    if len(path.encode()) >= LONGEST_PATH:
        found = f"{_few(path)} has {len(path.encode()):,} bytes, and a path has less than {LONGEST_PATH:,}"
        return Problem(found, "shorten it")
    return None


def _scheme_problem(url: str) -> Problem | None:
    from upath.registry import available_implementations  # noqa: PLC0415 - few runs name a URL

    known = sorted(available_implementations(fallback=True))
    # fsspec chains file systems, as in `simplecache::s3://bucket/file`.
    for scheme in url.partition("://")[0].split("::"):
        if scheme not in known:
            near = get_close_matches(scheme.lower(), known, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}://'?" if near else "use one that it has, such as 's3://', or a directory"
            return Problem(f"{_few(url)}: fsspec knows no file system {_few(scheme + '://')}", hint)
    return None


def _few(text: str) -> str:
    return repr(text if len(text) <= _FEW else f"{text[: _FEW - 3]}...")


def _checked(path: str) -> str:
    if problem := path_problem(path):
        raise ConfigError(problem)
    return path


PathText = Annotated[str, AfterValidator(_checked)]
"""A path, URL or name of a built-in source."""
