"""Where files are: on this machine, or behind a URL that fsspec knows."""

from pathlib import Path

from upath import UPath

Location = Path | UPath
"""A file or directory: a Path on this machine, a UPath behind a URL."""


def is_local(location: Location) -> bool:
    """Return whether a location is on this machine, where it can be renamed."""
    return isinstance(location, Path)


def errors_of(location: Location) -> tuple[type[Exception], ...]:
    """Return the exceptions that reading or writing at a location may raise.

    The libraries behind URLs have exceptions of their own.
    """
    return (OSError,) if is_local(location) else (Exception,)
