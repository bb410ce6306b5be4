"""Locations of checkpoints: a local directory, or any URL that fsspec knows.

Examples of URLs are `s3://`, `gs://` and `memory://`. Both kinds are handled as paths. A local
directory can be renamed and an object store cannot, so callers must not rely on renaming: see
`meshtrain.checkpoint.storage.directory`.
"""

import io
import os
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemBase
from upath import UPath

from meshtrain.config.reading import shown_path
from meshtrain.config.settings import Settings
from meshtrain.errors import CheckpointError, reason_of
from meshtrain.runtime.location import Location, errors_of, is_local

_BLOCK = 2**20


class SavedFile(Settings):
    """What a file of a checkpoint must be."""

    num_bytes: int
    """Size of the file."""
    xxh3_128: str
    """Hash of the content, in hexadecimal."""


def open_location(where: str) -> Location:
    """Return the location that a path or URL names.

    Raises:
        CheckpointError: if no installed library can reach it.
    """
    if "://" not in where:
        return Path(where)
    try:
        found = UPath(where)
        _ = found.fs
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{where} cannot be reached: {error}") from error
    return found


@contextmanager
def errors_in_one_line(location: Location) -> Iterator[None]:
    """Turn errors of the block, which reads the location, into an error of one line.

    Raises:
        CheckpointError: if the block cannot read the location.
    """
    try:
        yield
    except errors_of(location) as error:
        raise CheckpointError(f"{location} cannot be read: {reason_of(error)}; nothing was changed there") from error


def shown_location(location: Location) -> str:
    """Return a location as the user would write it in the current directory."""
    return shown_path(location) if isinstance(location, Path) else str(location)


@contextmanager
def write_hashed(location: Location, record: Callable[[SavedFile], None]) -> Iterator["HashedFile"]:
    """Open a file for writing. Once it is stored, call `record` with its size and hash."""
    with location.open("wb") as stream:
        file = HashedFile(stream)
        yield file
        stream.flush()
        if is_local(location):
            os.fsync(stream.fileno())
    record(file.saved())


class HashedFile(io.RawIOBase):
    """A file that is hashed while it is written, from its start to its end."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream, self._hash, self._num_bytes = stream, xxhash.xxh3_128(), 0

    def write(self, data: Any) -> int:
        """Append data, and return the number of bytes written."""
        self._hash.update(data)
        self._num_bytes += memoryview(data).nbytes
        return self._stream.write(data)

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._num_bytes

    def writable(self) -> bool:
        """Return True."""
        return True

    def saved(self) -> SavedFile:
        """Return size and hash of what was written so far."""
        return SavedFile(num_bytes=self._num_bytes, xxh3_128=self._hash.hexdigest())


def hash_file(location: Location) -> SavedFile:
    """Read a file, and return its size and hash."""
    digest, num_bytes = xxhash.xxh3_128(), 0
    with location.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
            num_bytes += len(block)
    return SavedFile(num_bytes=num_bytes, xxh3_128=digest.hexdigest())


def children(directory: Location) -> list[Location]:
    """List a directory by name, as it is now. The list is empty if there is no directory."""
    return [child for child, _ in _entries(directory)]


def file_names(directory: Location) -> set[str]:
    """Return the names of the files in a directory, or nothing if there is no directory.

    Behind a URL, use this to find out whether a file exists. `isfile` and `isdir` of fsspec return
    False after any error. A file behind a lost connection would be taken for absent, and replaced.
    """
    return {child.name for child, is_directory in _entries(directory) if not is_directory}


def files_below(directory: Location) -> Iterator[tuple[str, Location]]:
    """Yield every file under a directory, with its relative name.

    Names have the form of `huggingface/config.json`.
    """
    for child, is_directory in _entries(directory):
        if is_directory:
            for name, file in files_below(child):
                yield f"{child.name}/{name}", file
        else:
            yield child.name, child


def _entries(directory: Location) -> list[tuple[Location, bool]]:
    """Return the entries of a directory by name, each with whether it is a directory."""
    if isinstance(directory, UPath):
        # Some file systems cache what they have listed before.
        directory.fs.invalidate_cache()
        try:
            listed = directory.fs.ls(directory.path, detail=True)
        except FileNotFoundError:
            return []
        kinds = {PurePosixPath(entry["name"]).name: entry["type"] == "directory" for entry in listed}
        # A store may list a directory inside itself, as a file of zero bytes.
        kinds.pop(directory.name, None)
        return [(directory / name, kinds[name]) for name in sorted(kinds)]
    if not directory.is_dir():
        return []
    return [(child, child.is_dir()) for child in sorted(directory.iterdir())]


def remove_tree(directory: Location) -> None:
    """Remove a directory and everything in it."""
    if isinstance(directory, UPath):
        directory.fs.rm(directory.path, recursive=True)
    else:
        shutil.rmtree(directory)


@contextmanager
def local_path(directory: Location) -> Iterator[Path]:
    """Yield a directory as a local one: itself, or a copy that exists while the block runs."""
    if isinstance(directory, Path):
        yield directory
        return
    with TemporaryDirectory() as temporary:
        copy = Path(temporary)
        for name, file in files_below(directory):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(file.read_bytes())
        yield copy


class LocationSystem(FileSystemBase):
    """The file operations of DCP's reader and writer, for both kinds of location.

    Attributes:
        written: name -> size and hash of every file that was written.
    """

    def __init__(self) -> None:
        self.written: dict[str, SavedFile] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        """Open a file. What is written into it is hashed."""
        if mode == "wb":
            with write_hashed(path, lambda saved: self.written.update({path.name: saved})) as file:
                yield file
        else:
            with path.open(mode) as stream:
                yield stream

    def concat_path(self, path: Any, suffix: str) -> Any:
        """Return the path of a file in a directory."""
        return path / suffix

    def rename(self, path: Any, new_path: Any) -> None:
        """Rename a file, or copy it where that is not possible."""
        path.rename(new_path)
        self.written[new_path.name] = self.written.pop(path.name)

    def init_path(self, path: Any) -> Any:
        """Return the path unchanged."""
        return path

    def mkdir(self, path: Any) -> None:
        """Create a directory and its parents."""
        path.mkdir(parents=True, exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return whether this is a location. Every location may hold a checkpoint."""
        return isinstance(checkpoint_id, Path | UPath)

    def exists(self, path: Any) -> bool:
        """Return whether a file exists."""
        return bool(path.exists())

    def rm_file(self, path: Any) -> None:
        """Remove a file."""
        path.unlink()
