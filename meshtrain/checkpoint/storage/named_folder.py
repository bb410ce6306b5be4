"""A folder that the user names: written into a draft, whole when it is there, and never more than filled if it exists.

An existing one may be a mount point, a link, the working directory, or have been made with care for who may read it.
"""

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from torch.distributed import ProcessGroup
from transformers.utils import CONFIG_NAME

from meshtrain.checkpoint.storage.directory import MANIFEST_NAME
from meshtrain.checkpoint.storage.location import Location
from meshtrain.errors import CheckpointError
from meshtrain.runtime.agreement import failing_together, is_first_rank
from meshtrain.runtime.claims import is_claim
from meshtrain.runtime.disk import flush, flush_tree
from meshtrain.runtime.lock import Lock, locked

_LAST = (CONFIG_NAME, MANIFEST_NAME)
"""Without them nobody takes a folder for a model or a checkpoint."""


def check_new(folder: Path) -> None:
    """Refuse a folder that has something in it.

    Raises:
        CheckpointError: if it has.
    """
    if folder.exists() and (not folder.is_dir() or _has_something(folder)):
        raise CheckpointError(f"{folder} exists and is not empty; write into a new folder")


def draft_of(folder: Path) -> Path:
    """Return where a folder is written before it is complete: in it if it exists, beside it otherwise.

    Where several processes write, one of them decides: another may see the folder made meanwhile.
    """
    folder = folder.resolve()
    return (folder if folder.is_dir() else folder.parent) / f".{folder.name}.writing"


def _has_something(folder: Path) -> bool:
    # A draft there was left by a process that was killed, and the lock may be this process's own.
    return any(path != draft_of(folder) and not is_claim(path) for path in folder.resolve().iterdir())


def locked_folder(folder: Location) -> AbstractContextManager[Lock]:
    """Keep other processes from writing into a folder while the block runs.

    Raises:
        CheckpointError: if another process writes into it.
    """
    return locked(folder, str(folder), "write into another folder", CheckpointError)


@contextmanager
def locked_together(folder: Location, group: ProcessGroup | None = None) -> Iterator[None]:
    """Do `locked_folder` on the first rank, for all. Collective.

    Raises:
        CheckpointError: the same on all ranks, if a process that is none of them writes into the folder.
    """
    with ExitStack() as stack:
        with failing_together(CheckpointError, group):
            if is_first_rank():
                stack.enter_context(locked_folder(folder))
        yield


def start_folder(draft: Path) -> None:
    """Make an empty directory to write a folder into."""
    remove_draft(draft)
    draft.mkdir(parents=True)


def remove_draft(draft: Path) -> None:
    """Remove what was written in vain."""
    shutil.rmtree(draft, ignore_errors=True)


def publish_folder(draft: Path, folder: Path) -> None:
    """Give a draft its name, when all of it is on the disk.

    Raises:
        CheckpointError: if the folder has got something in it meanwhile.
    """
    check_new(folder)
    folder = folder.resolve()
    flush_tree(draft)
    if draft.parent != folder:
        draft.rename(folder)
        flush(folder.parent)
        return
    for path in sorted(draft.iterdir(), key=lambda path: (path.name in _LAST, path.name)):
        path.rename(folder / path.name)
    draft.rmdir()
    flush(folder)


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Give a draft to write into; it gets the name of the folder at the end, and is removed after an error.

    Raises:
        CheckpointError: if the folder has something in it, or the disk is full.
    """
    check_new(folder)
    draft = draft_of(folder)
    try:
        start_folder(draft)
        yield draft
        publish_folder(draft, folder)
    except OSError as error:
        raise CheckpointError(cannot_write(folder, error)) from error
    finally:
        remove_draft(draft)


def cannot_write(folder: Path, error: OSError) -> str:
    """Say why a folder cannot be written, in a line."""
    return f"cannot write {folder}: {error.strerror or error}; make room or write elsewhere"
