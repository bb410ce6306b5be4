"""The files of a lock: one per process that wants to write into a folder, in the folder or beside it.

FOLDER/.lock-TOKEN         if the folder exists, and behind a URL
PARENT/.FOLDER.lock-TOKEN  if it does not exist yet: whoever asks must not make it

Every process writes and renews its own file, under a name that no other has, so that nothing has to be atomic but the
listing: NFS and object stores can do no more. A file may be removed by whoever knows that its process is dead.
"""

import errno
import os
from pathlib import Path, PurePosixPath

from upath import UPath

MARK = ".lock-"

Place = Path | UPath
"""A folder or file: a Path on this machine, a UPath behind a URL."""


def is_claim(path: Path) -> bool:
    """Whether a file in a folder belongs to its lock."""
    return path.name.startswith(MARK)


def token_of(claim: Place) -> str:
    """Return the part of a file's name that no other has."""
    return claim.name.rpartition(MARK)[2]


def list_claims(folder: Place) -> list[Place]:
    """Return the files of all that want to write into a folder, or do."""
    if isinstance(folder, UPath):
        # Some file systems remember what they have listed before.
        folder.fs.invalidate_cache()
        try:
            names = [PurePosixPath(entry["name"]).name for entry in folder.fs.ls(folder.path, detail=True)]
        except FileNotFoundError:
            return []
        return [folder / name for name in sorted(names) if name.startswith(MARK)]
    found = _named(folder, MARK)
    # Whoever may not list the folder above, as above a mount point, cannot have written there.
    if os.access(folder.parent, os.R_OK):
        found += _named(folder.parent, f".{folder.name}{MARK}")
    return found


def _named(directory: Path, start: str) -> list[Place]:
    if not directory.is_dir():
        return []
    return [directory / name for name in sorted(os.listdir(directory)) if name.startswith(start)]


def read_claim(claim: Place) -> bytes | None:
    """Return what a file holds; None if it is gone."""
    if isinstance(claim, UPath):
        claim.fs.invalidate_cache()
    try:
        return claim.read_bytes()
    except FileNotFoundError:
        return None


def renew_claim(claim: Place, content: bytes) -> None:
    """Replace what a file holds by as many bytes.

    Raises:
        FileNotFoundError: if it is gone: who removed it took this process for dead.
    """
    if isinstance(claim, UPath):
        if read_claim(claim) is None:
            raise FileNotFoundError(claim.path)
        claim.write_bytes(content)
        return
    # Not replaced by another file: that would make it anew where it was removed a moment ago.
    descriptor = os.open(claim, os.O_WRONLY)
    try:
        os.pwrite(descriptor, content, 0)
    finally:
        os.close(descriptor)


def remove_claim(claim: Place) -> None:
    """Remove a file, if it is there."""
    claim.unlink(missing_ok=True)


class ClaimFile:
    """The file of this process.

    Args:
        folder: what is to be locked, without links.
        token: a name that no other process has.
        content: of the file.
    """

    def __init__(self, folder: Place, token: str, content: bytes) -> None:
        self._made: list[Path] = []
        if isinstance(folder, UPath):
            self.path: Place = folder / f"{MARK}{token}"
            folder.mkdir(parents=True, exist_ok=True)
        else:
            is_there = folder.is_dir()
            home = folder if is_there else folder.parent
            self.path = home / (f"{MARK}{token}" if is_there else f".{folder.name}{MARK}{token}")
            self._made = [place for place in (home, *home.parents) if not place.exists()]
            if home.exists() and not home.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(home))
            home.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(content)

    def remove(self) -> None:
        """Remove the file, and the folders that were made for it, if nothing else has come into them."""
        remove_claim(self.path)
        for place in self._made:
            try:
                place.rmdir()
            except OSError:
                break
