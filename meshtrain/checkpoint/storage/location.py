"""Where checkpoints lie: a directory of this machine, or any URL that fsspec knows (`s3://`, `gs://`, `memory://`).

Both are handled as paths. What a local directory can do and an object store cannot, and so must not be relied on, is to
rename: see `meshtrain.checkpoint.storage.directory`.
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

from meshtrain.config.reading import shown
from meshtrain.config.settings import Settings
from meshtrain.errors import CheckpointError

Location = Path | UPath
"""A file or directory: a Path on this machine, a UPath behind a URL."""

_BLOCK = 2**20


class SavedFile(Settings):
    """What a file of a checkpoint must be."""

    num_bytes: int
    """Its size."""
    xxh3_128: str
    """The hash of its content, in hexadecimal."""


def open_location(where: str) -> Location:
    """Return the location that a path or URL names.

    Raises:
        CheckpointError: if nothing installed can reach it.
    """
    if "://" not in where:
        return Path(where)
    try:
        found = UPath(where)
        _ = found.fs
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{where} cannot be reached: {error}") from error
    return found


def is_local(location: Location) -> bool:
    """Whether a location is a directory or file of this machine, which can be renamed."""
    return isinstance(location, Path)


def errors_of(location: Location) -> tuple[type[Exception], ...]:
    """Return what reading or writing there may raise: the libraries behind URLs have exceptions of their own."""
    return (OSError,) if is_local(location) else (Exception,)


def reason_of(error: BaseException) -> str:
    """Return in a line why something could not be read or written."""
    return getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "") or type(error).__name__


@contextmanager
def told_in_a_line(location: Location) -> Iterator[None]:
    """Read something there.

    Raises:
        CheckpointError: if that is not possible.
    """
    try:
        yield
    except errors_of(location) as error:
        raise CheckpointError(f"{location} cannot be read: {reason_of(error)}; nothing was changed there") from error


def shown_location(location: Location) -> str:
    """Return a location as a person in the current directory would say it."""
    return shown(location) if isinstance(location, Path) else str(location)


@contextmanager
def write_hashed(location: Location, record: Callable[[SavedFile], None]) -> Iterator["HashedFile"]:
    """Open a file for writing; when it is on the disk, `record` is given what it must be."""
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
        """Append."""
        self._hash.update(data)
        self._num_bytes += memoryview(data).nbytes
        return self._stream.write(data)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._num_bytes

    def writable(self) -> bool:
        """It is."""
        return True

    def saved(self) -> SavedFile:
        """Return what was written so far."""
        return SavedFile(num_bytes=self._num_bytes, xxh3_128=self._hash.hexdigest())


def hash_file(location: Location) -> SavedFile:
    """Read a file and return what it is."""
    digest, num_bytes = xxhash.xxh3_128(), 0
    with location.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
            num_bytes += len(block)
    return SavedFile(num_bytes=num_bytes, xxh3_128=digest.hexdigest())


def children(directory: Location) -> list[Location]:
    """List a directory by name, as it is now; nothing if there is none."""
    return [child for child, _ in _entries(directory)]


def file_names(directory: Location) -> set[str]:
    """Return the names of the files in a directory; nothing if there is none.

    Behind a URL this is how to ask whether a file is there: `isfile` and `isdir` of fsspec say no after any error, and
    what a lost connection hides would be taken for absent, and replaced.
    """
    return {child.name for child, is_directory in _entries(directory) if not is_directory}


def files_below(directory: Location) -> Iterator[tuple[str, Location]]:
    """Yield every file under a directory with its name relative to it, as in `huggingface/config.json`."""
    for child, is_directory in _entries(directory):
        if is_directory:
            for name, file in files_below(child):
                yield f"{child.name}/{name}", file
        else:
            yield child.name, child


def _entries(directory: Location) -> list[tuple[Location, bool]]:
    """Return what is in a directory, by name, and whether it is a directory itself."""
    if isinstance(directory, UPath):
        # Some file systems remember what they have listed before.
        directory.fs.invalidate_cache()
        try:
            listed = directory.fs.ls(directory.path, detail=True)
        except FileNotFoundError:
            return []
        kinds = {PurePosixPath(entry["name"]).name: entry["type"] == "directory" for entry in listed}
        # A store may list a directory as a file of no length in itself.
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
def as_local(directory: Location) -> Iterator[Path]:
    """Give a directory as one of this machine: itself, or a copy for as long as it is needed."""
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
    """What DCP's reader and writer do to files, for both kinds of location.

    Attributes:
        written: name -> what was written, of every file.
    """

    def __init__(self) -> None:
        self.written: dict[str, SavedFile] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        """Open a file; what is written is hashed."""
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
        """Return the path as it is."""
        return path

    def mkdir(self, path: Any) -> None:
        """Make a directory and those above it."""
        path.mkdir(parents=True, exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Every location may hold a checkpoint."""
        return isinstance(checkpoint_id, Path | UPath)

    def exists(self, path: Any) -> bool:
        """Whether there is such a file."""
        return bool(path.exists())

    def rm_file(self, path: Any) -> None:
        """Remove a file."""
        path.unlink()
