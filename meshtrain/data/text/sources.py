"""Sources of text: the sources named in a run file become a list of files."""

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
"""The built-in source: the `.py` files of the running Python's standard library.

It is real text that needs no download.
"""

NOT_STDLIB_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

FileKind = Literal["python", "jsonl", "jsonl.gz", "jsonl.zst", "txt", "txt.gz", "txt.zst", "parquet", "tokens"]
KINDS: dict[str, FileKind] = {
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
"""Directories of text often hold such files that are not text, such as `dataset_info.json`.

If such a file is named, it is read as JSON lines.
"""

NAMES_SHOWN = 8


@dataclass(frozen=True)
class SourceFile:
    """A file of documents, and what its directory entry held when it was found."""

    path: Path
    kind: FileKind
    num_bytes: int
    modified_nanoseconds: int

    def is_unchanged(self) -> bool:
        """Return whether the directory entry is still the same."""
        return self.path.is_file() and inspect_file(self.path, self.kind) == self


def find_files(sources: Sequence[str], *, key: str) -> list[SourceFile]:
    """Expand sources into files, in the order of the sources.

    Files of a glob or a directory are sorted by name.

    A file that is named twice is read twice. Empty files of a glob or a directory are left out. A
    directory stands for all files of a known kind below it, except SKIPPED_IN_DIRECTORIES and names
    with a leading dot.

    Args:
        sources: PYTHON_STDLIB, or absolute paths of files and directories, and globs.
        key: the setting that names the sources, for messages.

    Raises:
        DataError: with every source that is missing, empty, not readable or of an unknown kind.
    """
    files: list[SourceFile] = []
    problems: list[str | Problem] = []
    for source in sources:
        try:
            files += find_python_files(sysconfig.get_path("stdlib")) if source == PYTHON_STDLIB else _expand(source)
        except DataError as error:
            problems += [problem.concerning(key) for problem in error.problems]
        except OSError as error:
            problems.append(f'{key}: cannot read "{error.filename}": {error.strerror}; fix its permissions')
    if problems:
        raise DataError(problems)
    return files


def find_typed_files(sources: Sequence[str]) -> list[SourceFile]:
    """Expand sources of a command line, relative to the working directory; see `find_files`."""
    paths = [source if source == PYTHON_STDLIB else str(Path(source).absolute()) for source in sources]
    return find_files(paths, key="SOURCES")


def find_python_files(root: str) -> list[SourceFile]:
    """Return the sorted `.py` files below `root`, without tests and installed packages.

    Raises:
        DataError: if there are none, as in a Python that is packed into one file.
    """
    paths: list[Path] = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = set(subdirectories) - NOT_STDLIB_TEXT
        paths += [Path(directory, name) for name in names if name.endswith(".py")]
    files = [file for path in sorted(paths) if (file := inspect_file(path, "python")).num_bytes]
    if not files:
        raise DataError(f"{PYTHON_STDLIB}: this Python has no .py files in {root}", "name your own files")
    return files


def _expand(source: str) -> list[SourceFile]:
    if "://" in source:
        raise DataError(f'"{source}" is a URL, but only training sources with streaming = true are read from URLs')
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
        raise DataError(f'"{source}" is empty', "leave it out, or write documents into it")
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
            f'"{root}" is a directory without a file of a known kind that holds anything; {_contents(root)}',
            f"use one of {_known_kinds(in_directory=True)}",
        )
    return files


def _raise(error: OSError) -> None:
    raise error


def _expand_glob(pattern: str) -> list[SourceFile]:
    found = map(Path, sorted(glob.glob(pattern, recursive=True)))
    # A broken link is not a file. It stays in the list, so that `inspect_file` refuses it.
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


def _kind(path: Path) -> FileKind:
    for suffix, kind in KINDS.items():
        if path.name.endswith(suffix):
            return kind
    raise DataError(
        f'"{path}" is not of a known kind', f"use one of {_known_kinds()}, or the built-in source {PYTHON_STDLIB}"
    )


def _known_kinds(*, in_directory: bool = False) -> str:
    return ", ".join(suffix for suffix in KINDS if suffix != SKIPPED_IN_DIRECTORIES or not in_directory)


def inspect_file(path: Path, kind: FileKind) -> SourceFile:
    """Return a file with what its directory entry holds.

    Raises:
        DataError: if it is a broken link, or this user may not read it.
        OSError: if it does not exist.
    """
    if not os.access(path, os.R_OK, effective_ids=True):
        _check_link(path)
        raise DataError(f'"{path}" may not be read by this user', "fix its permissions or leave it out")
    status = path.stat()
    return SourceFile(path, kind, status.st_size, status.st_mtime_ns)


def _check_link(path: Path) -> None:
    """Check that a path is not a broken link.

    Raises:
        DataError: if it is; names the target.
    """
    if not path.is_symlink():
        return
    try:
        path.stat()
    except OSError as error:
        # A target that this user may not inspect is not a broken link.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise DataError(
                f'"{path}" is a broken link: it points to "{path.readlink()}", and there is no such file',
                "fix the link, or leave it out",
            ) from error


def _nearest(path: Path) -> str:
    directory = _existing(path)
    if directory != path.parent:
        return f", nor does its directory; {_contents(directory)}"
    similar = get_close_matches(path.name, [PYTHON_STDLIB, *os.listdir(directory)], n=1)
    return f'; did you mean "{similar[0]}"?' if similar else f"; {_contents(directory)}"


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.is_dir())


def _contents(directory: Path) -> str:
    names = sorted(entry.name + "/" * entry.is_dir() for entry in directory.iterdir())
    return f"{directory} holds {name_some(names, NAMES_SHOWN) or 'nothing'}"


def find_streamed_files(sources: Sequence[str], *, key: str) -> list[SourceFile]:
    """Expand sources that are read while training: as `find_files`, and URLs that fsspec knows.

    A URL is a file or a glob.

    Raises:
        DataError: as `find_files`; or if a URL cannot be reached, or matches no file.
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
        url = UPath(source)
        names = sorted(url.fs.glob(url.path)) if glob.has_magic(url.path) else [url.path]
        paths = [UPath(url.fs.unstrip_protocol(name), **url.storage_options) for name in names]
        sizes = [int(url.fs.size(name) or 0) for name in names]
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{key}: {source} cannot be reached: {reason}") from error
    if not any(sizes):
        raise DataError(f"{key}: {source} matches no file that holds anything")
    try:
        return [SourceFile(path, _kind(path), size, 0) for path, size in zip(paths, sizes, strict=True) if size]
    except DataError as error:
        raise DataError(problem.concerning(key) for problem in error.problems) from error
