"""Where the text comes from: the sources named in a run file become a list of files."""

import errno
import glob
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from upath import UPath

from meshtrain.errors import DataError, Problem, name_some

PYTHON_STDLIB = "python-stdlib"
"""The built-in source: the `.py` files of the running Python's standard library. Real text without a download."""

NOT_STDLIB_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

Kind = Literal["python", "jsonl", "jsonl.gz", "jsonl.zst", "txt", "txt.gz", "txt.zst", "parquet", "tokens"]
KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".jsonl.zst": "jsonl.zst",
    ".json": "jsonl",
    ".json.gz": "jsonl.gz",
    ".json.zst": "jsonl.zst",
    ".txt": "txt",
    ".txt.gz": "txt.gz",
    ".txt.zst": "txt.zst",
    ".parquet": "parquet",
}
SKIPPED_IN_DIRECTORIES = ".json"
"""Directories of text hold such files that are not text (`dataset_info.json`); named one by one, they are lines."""

NAMES_SHOWN = 8


@dataclass(frozen=True)
class SourceFile:
    """A file of documents, and what its directory entry said when it was found."""

    path: Path
    kind: Kind
    num_bytes: int
    modified_nanoseconds: int

    def is_unchanged(self) -> bool:
        """Tell whether the directory entry still says the same."""
        return self.path.is_file() and inspect_file(self.path, self.kind) == self


def find_files(sources: Sequence[str], *, key: str) -> list[SourceFile]:
    """Expand sources into files, in the order of the sources; those of a glob or a directory are sorted by name.

    A file that is named twice is read twice. Empty files of a glob or a directory are left out; a directory stands for
    all files of a known kind below it but SKIPPED_IN_DIRECTORIES and those that begin with a dot.

    Args:
        sources: PYTHON_STDLIB, or absolute paths of files and directories, and globs.
        key: the key of the run file that names them, for messages.

    Raises:
        DataError: every source that is missing, empty, not readable or of an unknown kind.
    """
    files: list[SourceFile] = []
    problems: list[str | Problem] = []
    for source in sources:
        try:
            files += find_python_files(sysconfig.get_path("stdlib")) if source == PYTHON_STDLIB else _expand(source)
        except DataError as error:
            problems += [problem.concerning(key) for problem in error.problems]
        except OSError as error:
            problems.append(f'{key}: cannot look at "{error.filename}": {error.strerror}; mend its permissions')
    if problems:
        raise DataError(problems)
    return files


def find_typed_files(sources: Sequence[str]) -> list[SourceFile]:
    """Expand sources as somebody typed them, relative to where they were typed; see `find_files`."""
    paths = [source if source == PYTHON_STDLIB else str(Path(source).absolute()) for source in sources]
    return find_files(paths, key="SOURCES")


def find_python_files(root: str) -> list[SourceFile]:
    """Return the `.py` files of a standard library that lies in `root`, sorted, without tests and installed packages.

    Raises:
        DataError: if there are none, as in a Python that was packed into one file.
    """
    paths: list[Path] = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = set(subdirectories) - NOT_STDLIB_TEXT
        paths += [Path(directory, name) for name in names if name.endswith(".py")]
    files = [file for path in sorted(paths) if (file := inspect_file(path, "python")).num_bytes]
    if not files:
        raise DataError(f"{PYTHON_STDLIB}: this Python keeps no .py files in {root}; name files of your own")
    return files


def _expand(source: str) -> list[SourceFile]:
    if "://" in source:
        raise DataError(f'"{source}" is a URL, and only what is trained on with streaming = true is read from URLs')
    if glob.has_magic(source) and not os.path.lexists(source):
        return _expand_glob(source)
    path = Path(source)
    if path.is_dir():
        return _expand_directory(path)
    if not path.exists():
        _check_link(path)
        raise DataError(f'"{source}" does not exist{_nearest(path)}')
    file = inspect_file(path, _kind(path))
    if not file.num_bytes:
        raise DataError(f'"{source}" is empty; leave it out, or write documents into it')
    return [file]


def _expand_directory(root: Path) -> list[SourceFile]:
    paths: list[Path] = []
    for directory, subdirectories, names in os.walk(root, onerror=_raise):
        subdirectories[:] = [name for name in subdirectories if not name.startswith(".")]
        paths += [Path(directory, name) for name in names if not name.startswith(".")]
    known = [
        path for path in sorted(paths) if path.name.endswith(tuple(KINDS)) and path.suffix != SKIPPED_IN_DIRECTORIES
    ]
    files = [file for path in known if (file := inspect_file(path, _kind(path))).num_bytes]
    if not files:
        raise DataError(
            f'"{root}" is a directory without a file of a known kind that holds anything; '
            f"known are {_known_kinds(in_directory=True)}; {_contents(root)}"
        )
    return files


def _raise(error: OSError) -> None:
    raise error


def _expand_glob(pattern: str) -> list[SourceFile]:
    found = map(Path, sorted(glob.glob(pattern, recursive=True)))
    # A broken link is no file. It is kept here, for `inspect_file` to refuse it.
    paths = [path for path in found if path.is_file() or not path.exists()]
    if not paths:
        fixed = Path(pattern)
        while glob.has_magic(str(fixed)):
            fixed = fixed.parent
        raise DataError(f'"{pattern}" matches no file; {_contents(_existing(fixed))}')
    files = [inspect_file(path, _kind(path)) for path in paths]
    if not any(file.num_bytes for file in files):
        raise DataError(f'"{pattern}" matches only empty files; the first is {paths[0]}')
    return [file for file in files if file.num_bytes]


def _kind(path: Path) -> Kind:
    for suffix, kind in KINDS.items():
        if path.name.endswith(suffix):
            return kind
    raise DataError(f'"{path}" is of no known kind; known are {_known_kinds()} and the built-in source {PYTHON_STDLIB}')


def _known_kinds(*, in_directory: bool = False) -> str:
    return ", ".join(suffix for suffix in KINDS if suffix != SKIPPED_IN_DIRECTORIES or not in_directory)


def inspect_file(path: Path, kind: Kind) -> SourceFile:
    """Look at a file.

    Raises:
        DataError: if it is a broken link, or may not be read.
        OSError: if it is not there.
    """
    if not os.access(path, os.R_OK, effective_ids=True):
        _check_link(path)
        raise DataError(f'"{path}" may not be read by this user; mend its permissions or leave it out')
    status = path.stat()
    return SourceFile(path, kind, status.st_size, status.st_mtime_ns)


def _check_link(path: Path) -> None:
    """Check that a path is no broken link.

    Raises:
        DataError: if it is one; with the place that it points to.
    """
    if not path.is_symlink():
        return
    try:
        path.stat()
    except OSError as error:
        # A target that this user may not look at is no broken link.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise DataError(
                f'"{path}" is a broken link: it points to "{path.readlink()}", and there is no such file; mend the '
                "link, or leave it out"
            ) from error


def _nearest(path: Path) -> str:
    directory = _existing(path)
    if directory != path.parent:
        return f", nor does its directory; {_contents(directory)}"
    similar = get_close_matches(path.name, [PYTHON_STDLIB, *os.listdir(directory)], n=1)
    return f'; did you mean "{similar[0]}"?' if similar else f"; {_contents(directory)}"


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.is_dir())


def _contents(directory: Path) -> str:
    names = sorted(entry.name + "/" * entry.is_dir() for entry in directory.iterdir())
    return f"{directory} holds {name_some(names, NAMES_SHOWN) or 'nothing'}"


def find_streamed_files(sources: Sequence[str], *, key: str) -> list[SourceFile]:
    """Expand sources that are read while training: as `find_files`, and URLs that fsspec knows, files or globs.

    Raises:
        DataError: as `find_files`; or that a URL cannot be reached, or stands for nothing.
    """
    files: list[SourceFile] = []
    problems: list[str | Problem] = []
    for source in sources:
        try:
            files += _expand_url(source, key) if "://" in source else find_files([source], key=key)
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    return files


def _expand_url(source: str, key: str) -> list[SourceFile]:
    try:
        place = UPath(source)
        names = sorted(place.fs.glob(place.path)) if glob.has_magic(place.path) else [place.path]
        paths = [UPath(place.fs.unstrip_protocol(name), **place.storage_options) for name in names]
        sizes = [int(place.fs.size(name) or 0) for name in names]
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{key}: {source} cannot be reached: {reason}") from error
    if not any(sizes):
        raise DataError(f"{key}: {source} stands for no file that holds anything")
    try:
        return [SourceFile(path, _kind(path), size, 0) for path, size in zip(paths, sizes, strict=True) if size]
    except DataError as error:
        raise DataError(problem.concerning(key) for problem in error.problems) from error
