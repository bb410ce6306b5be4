"""Write a folder that the user names, so that it appears complete.

The files are written into a temporary directory first. A folder that exists is only filled, never
replaced: it may be a mount point, a link or the working directory, or its permissions may have been
set with care.
"""

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from torch.distributed import ProcessGroup
from transformers.utils import CONFIG_NAME

from meshtrain.checkpoint.storage.directory import MANIFEST_NAME
from meshtrain.errors import CheckpointError, reason_of
from meshtrain.runtime.agreement import failing_together, is_first_rank
from meshtrain.runtime.claims import is_claim
from meshtrain.runtime.disk import flush, flush_tree
from meshtrain.runtime.location import Location
from meshtrain.runtime.lock import Lock, locked

_LAST = (CONFIG_NAME, MANIFEST_NAME)
"""Files that make a folder a model or a checkpoint.

They are moved last, so that an incomplete folder is not taken for one.
"""


def check_new(folder: Path) -> None:
    """Check that a folder does not exist or is empty.

    Raises:
        CheckpointError: if it is neither.
    """
    if folder.exists() and (not folder.is_dir() or _has_something(folder)):
        raise CheckpointError(f"{folder} exists and is not empty", "write into a new folder")


def temporary_folder(folder: Path) -> Path:
    """Return the temporary directory in which a folder is written before it is complete.

    It is inside the folder if that exists, and beside it otherwise. Where several processes write,
    one of them must decide, because another may find the folder created meanwhile.
    """
    folder = folder.resolve()
    return (folder if folder.is_dir() else folder.parent) / f".{folder.name}.writing"


def _has_something(folder: Path) -> bool:
    # A temporary directory there was left by a killed process, and the lock may be this process's
    # own.
    return any(path != temporary_folder(folder) and not is_claim(path) for path in folder.resolve().iterdir())


def locked_folder(folder: Location) -> AbstractContextManager[Lock]:
    """Keep other processes from writing into a folder while the block runs.

    Raises:
        CheckpointError: if another process writes into it.
    """
    return locked(folder, str(folder), "write into another folder", CheckpointError)


@contextmanager
def locked_together(folder: Location, group: ProcessGroup | None = None) -> Iterator[None]:
    """Hold the lock of `locked_folder` on the first rank, for all ranks. Collective.

    Raises:
        CheckpointError: the same on all ranks, if a process outside the run writes into the folder.
    """
    with ExitStack() as stack:
        with failing_together(CheckpointError, group):
            if is_first_rank():
                stack.enter_context(locked_folder(folder))
        yield


def create_empty_folder(folder: Path) -> None:
    """Create an empty temporary directory in which a folder is written."""
    remove_temporary(folder)
    folder.mkdir(parents=True)


def remove_temporary(folder: Path) -> None:
    """Remove a temporary directory that was not published."""
    shutil.rmtree(folder, ignore_errors=True)


def publish_folder(temporary: Path, folder: Path) -> None:
    """Move a temporary directory to its final name, after all of its files are flushed to the disk.

    Raises:
        CheckpointError: if the folder is no longer empty.
    """
    check_new(folder)
    folder = folder.resolve()
    flush_tree(temporary)
    if temporary.parent != folder:
        temporary.rename(folder)
        flush(folder.parent)
        return
    for path in sorted(temporary.iterdir(), key=lambda path: (path.name in _LAST, path.name)):
        path.rename(folder / path.name)
    temporary.rmdir()
    flush(folder)


@contextmanager
def written_completely(folder: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes the folder at the end of the block.

    After an error, the temporary directory is removed.

    Raises:
        CheckpointError: if the folder is not empty, or the disk is full.
    """
    check_new(folder)
    temporary = temporary_folder(folder)
    try:
        create_empty_folder(temporary)
        yield temporary
        publish_folder(temporary, folder)
    except OSError as error:
        raise CheckpointError(cannot_write(folder, error)) from error
    finally:
        remove_temporary(temporary)


def cannot_write(folder: Path, error: OSError) -> str:
    """Return in one line why a folder cannot be written."""
    return f"cannot write {folder}: {reason_of(error)}; make room or write elsewhere"
