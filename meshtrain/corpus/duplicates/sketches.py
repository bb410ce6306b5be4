"""Sketches: the data that the step stores for every document to find and check near duplicates.

A document is identified by its number. Documents are numbered through all shards, in the order of
the shards' names. The result depends only on this order, not on the number of tasks or the size of
the shards.

Each shard has a directory with these arrays, as raw little-endian files:

    shingles.bin         (shingles,) uint64, document by document; see `shingles.py`
    shingle_ends.bin     (documents,) int64, the end of each document's shingles
    identifiers.bin      the `id` of each document, UTF-8
    identifier_ends.bin  (documents,) int64, the end of each document's `id`
    agreement.bin        (documents, hashes) uint8, the low byte of every MinHash, from which a
                         similarity is estimated quickly
    keys-BBB.bin         (documents with shingles,) uint64, their keys in band B, ascending
    documents-BBB.bin    (documents with shingles,) uint32, the document of each key, numbered
                         within this shard
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from meshtrain.corpus.duplicates.minhash import Bands, MinHasher
from meshtrain.corpus.duplicates.shingles import Hashes, Positions, Shingles

SKETCHES = "sketches"


class SketchWriter:
    """Writes the sketches of one shard.

    Args:
        directory: the directory for the sketches. It appears when they are complete.
        bands: how signatures are cut into bands.
    """

    def __init__(self, directory: Path, bands: Bands) -> None:
        self._directory = directory
        self._hasher = MinHasher(bands)
        self._bands = bands
        self._num_shingles = [np.zeros(0, np.int64)]
        self._agreement = [np.zeros((0, bands.num_hashes), np.uint8)]
        self._keys = [np.zeros((0, bands.num_bands), np.uint64)]
        self._identifiers: list[bytes] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        """Write the documents that are added inside the context."""
        with atomic_directory(self._directory) as temporary:
            with (temporary / "shingles.bin").open("wb") as self._shingles:
                yield
            self._finish(temporary)

    def add(self, identifiers: Sequence[str], shingles: Shingles) -> None:
        """Add the sketches of some documents."""
        signatures = self._hasher.signatures(shingles)
        shingles.hashes.tofile(self._shingles)
        self._num_shingles.append(np.diff(shingles.starts))
        self._agreement.append(signatures.astype(np.uint8))
        self._keys.append(self._hasher.bucket_keys(signatures))
        self._identifiers.extend(identifier.encode() for identifier in identifiers)

    def _finish(self, temporary: Path) -> None:
        num_shingles = np.concatenate(self._num_shingles)
        np.cumsum(num_shingles).tofile(temporary / "shingle_ends.bin")
        (temporary / "identifiers.bin").write_bytes(b"".join(self._identifiers))
        lengths = np.array([len(identifier) for identifier in self._identifiers], np.int64)
        np.cumsum(lengths).tofile(temporary / "identifier_ends.bin")
        np.concatenate(self._agreement).tofile(temporary / "agreement.bin")
        documents = np.flatnonzero(num_shingles).astype(np.uint32)
        keys = np.concatenate(self._keys)[documents]
        for band in range(self._bands.num_bands):
            order = np.argsort(keys[:, band], kind="stable")
            keys[order, band].tofile(temporary / f"keys-{band:03d}.bin")
            documents[order].tofile(temporary / f"documents-{band:03d}.bin")


class ShardSketches:
    """Reads the sketches of one shard, which are mapped into memory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @cached_property
    def shingle_ends(self) -> Positions:
        """(documents,) int64, the end of each document's shingles."""
        return map_array(self._directory / "shingle_ends.bin", np.int64)

    @cached_property
    def _shingles(self) -> Hashes:
        return map_array(self._directory / "shingles.bin", np.uint64)

    @cached_property
    def _identifiers(self) -> tuple[NDArray[np.uint8], Positions]:
        names = ("identifiers.bin", np.uint8), ("identifier_ends.bin", np.int64)
        text, ends = (map_array(self._directory / name, kind) for name, kind in names)
        return text, ends

    @cached_property
    def agreement(self) -> NDArray[np.uint8]:
        """(documents, hashes) uint8, the low byte of every MinHash."""
        flat = map_array(self._directory / "agreement.bin", np.uint8)
        return flat.reshape(len(self.shingle_ends), -1) if len(flat) else flat.reshape(0, 0)

    def num_shingles(self, documents: Positions) -> Positions:
        """Return the number of shingles of documents of this shard: (documents,) int64."""
        begins = np.where(documents > 0, self.shingle_ends[documents - 1], 0)
        return self.shingle_ends[documents] - begins

    def shingles(self, document: int) -> Hashes:
        """Return the shingles of a document of this shard."""
        return self._shingles[_begin(self.shingle_ends, document) : self.shingle_ends[document]]

    def identifier(self, document: int) -> str:
        """Return the `id` of a document of this shard."""
        text, ends = self._identifiers
        return text[_begin(ends, document) : ends[document]].tobytes().decode()

    def keys_between(self, band: int, lowest: int, highest: int) -> tuple[Hashes, NDArray[np.uint32]]:
        """Return the keys of a band from `lowest` to `highest`, ascending, and their documents."""
        keys = map_array(self._directory / f"keys-{band:03d}.bin", np.uint64)
        documents = map_array(self._directory / f"documents-{band:03d}.bin", np.uint32)
        begin = int(np.searchsorted(keys, np.uint64(lowest), "left"))
        end = int(np.searchsorted(keys, np.uint64(highest), "right"))
        return keys[begin:end], documents[begin:end]


class Sketches:
    """Reads the sketches of all shards.

    Args:
        work: the directory of the sketches.
        names: the names of the shards, in the order in which documents are numbered.
    """

    def __init__(self, work: Path, names: Sequence[str]) -> None:
        self.shards = [ShardSketches(work / SKETCHES / name) for name in names]
        sizes = [len(shard.shingle_ends) for shard in self.shards]
        self.first_documents = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)))
        """(shards + 1,) int64: the first document of each shard, then the number of documents."""

    @property
    def num_documents(self) -> int:
        """Number of documents in all shards."""
        return int(self.first_documents[-1])

    def shingles(self, document: int) -> Hashes:
        """Return the shingles of a document."""
        shard, position = self._locate(document)
        return shard.shingles(position)

    def identifier(self, document: int) -> str:
        """Return the `id` of a document."""
        shard, position = self._locate(document)
        return shard.identifier(position)

    def num_shingles(self, documents: Positions) -> Positions:
        """Return the number of shingles of ascending documents: (documents,) int64."""
        return np.concatenate([shard.num_shingles(inside) for shard, inside in self._by_shard(documents)])

    def agreement(self, documents: Positions) -> NDArray[np.uint8]:
        """Return the low bytes of the MinHashes of ascending documents.

        Returns:
            (documents, hashes) uint8.
        """
        return np.concatenate([shard.agreement[inside] for shard, inside in self._by_shard(documents)])

    def _by_shard(self, documents: Positions) -> Iterator[tuple[ShardSketches, Positions]]:
        """Yield each shard, and those of the ascending documents that it holds."""
        boundaries = np.searchsorted(documents, self.first_documents)
        for number, shard in enumerate(self.shards):
            if boundaries[number] < boundaries[number + 1]:
                yield shard, documents[boundaries[number] : boundaries[number + 1]] - self.first_documents[number]

    def _locate(self, document: int) -> tuple[ShardSketches, int]:
        number = int(np.searchsorted(self.first_documents, document, "right")) - 1
        return self.shards[number], document - int(self.first_documents[number])


def _begin(ends: Positions, position: int) -> int:
    return int(ends[position - 1]) if position else 0


def map_array(path: Path, kind: type[np.generic] | np.dtype[np.void]) -> NDArray:
    """Map a raw array into memory, so that only what is used gets read."""
    # An empty file cannot be mapped.
    return np.asarray(np.memmap(path, kind, "r")) if path.stat().st_size else np.zeros(0, kind)


@contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory to fill, and rename it to `directory` when it is complete."""
    temporary = directory.with_name(f"{directory.name}.partial")
    for left_behind in (temporary, directory):
        shutil.rmtree(left_behind, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    temporary.rename(directory)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file to write, and rename it to `path` when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.partial")
    with temporary.open("wb") as file:
        yield file
    temporary.rename(path)
