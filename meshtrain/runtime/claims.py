"""The files of a lock: one per process that requests or holds it, in the folder or beside it.

FOLDER/.lock-TOKEN         if the folder exists, and behind a URL
PARENT/.FOLDER.lock-TOKEN  if it does not exist yet, because a request must not create it

Every process writes and renews its own file, under a unique name. So nothing has to be atomic
except the listing; NFS and object stores guarantee no more. Any process that knows that the process
of a file is dead may remove the file.
"""

import errno
import os
from pathlib import Path, PurePosixPath

from upath import UPath

from meshtrain.runtime.location import Location

MARK = ".lock-"
"""Part of the name of every file of a lock."""


def is_claim(path: Path) -> bool:
    """Return whether a file in a folder belongs to the folder's lock."""
    return path.name.startswith(MARK)


def token_of(claim: Location) -> str:
    """Return the unique part of a file's name."""
    return claim.name.rpartition(MARK)[2]


def list_claims(folder: Location) -> list[Location]:
    """Return the files of all processes that request or hold the lock of a folder."""
    if isinstance(folder, UPath):
        # Some file systems cache what they have listed before.
        folder.fs.invalidate_cache()
        try:
            names = [PurePosixPath(entry["name"]).name for entry in folder.fs.ls(folder.path, detail=True)]
        except FileNotFoundError:
            return []
        return [folder / name for name in sorted(names) if name.startswith(MARK)]
    found = _named(folder, MARK)
    # A process that may not list the parent folder, as above a mount point, cannot have written
    # there.
    if os.access(folder.parent, os.R_OK):
        found += _named(folder.parent, f".{folder.name}{MARK}")
    return found


def _named(directory: Path, start: str) -> list[Location]:
    if not directory.is_dir():
        return []
    return [directory / name for name in sorted(os.listdir(directory)) if name.startswith(start)]


def read_claim(claim: Location) -> bytes | None:
    """Return the content of a file, or None if the file is gone."""
    if isinstance(claim, UPath):
        claim.fs.invalidate_cache()
    try:
        return claim.read_bytes()
    except FileNotFoundError:
        return None


def renew_claim(claim: Location, content: bytes) -> None:
    """Replace the content of a file by the same number of bytes.

    Raises:
        FileNotFoundError: if the file is gone, because another process took this one for dead.
    """
    if isinstance(claim, UPath):
        if read_claim(claim) is None:
            raise FileNotFoundError(claim.path)
        claim.write_bytes(content)
        return
    # The file is written in place. Replacing it would create it again if it was removed a moment
    # ago.
    descriptor = os.open(claim, os.O_WRONLY)
    try:
        os.pwrite(descriptor, content, 0)
    finally:
        os.close(descriptor)


def remove_claim(claim: Location) -> None:
    """Remove a file, if it exists."""
    claim.unlink(missing_ok=True)


class ClaimFile:
    """The file of this process.

    Args:
        folder: to be locked, with links resolved.
        token: unique among all processes.
        content: of the file.
    """

    def __init__(self, folder: Location, token: str, content: bytes) -> None:
        self._made: list[Path] = []
        if isinstance(folder, UPath):
            self.path: Location = folder / f"{MARK}{token}"
            folder.mkdir(parents=True, exist_ok=True)
        else:
            is_there = folder.is_dir()
            home = folder if is_there else folder.parent
            self.path = home / (f"{MARK}{token}" if is_there else f".{folder.name}{MARK}{token}")
            self._made = [parent for parent in (home, *home.parents) if not parent.exists()]
            if home.exists() and not home.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(home))
            home.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(content)

    def remove(self) -> None:
        """Remove the file, and the folders that were created for it, if they are empty."""
        remove_claim(self.path)
        for directory in self._made:
            try:
                directory.rmdir()
            except OSError:
                break
