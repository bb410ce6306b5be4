"""Sketches: what is kept on disk of every document to find and to check its near duplicates, shard by shard.

A document is named by its number: documents are counted through all shards in the order of their names. What comes out
depends on that order alone, and neither on the number of tasks nor on where one shard ends.

The arrays of a shard are raw little-endian files in a directory of its own:

    shingles.bin        (shingles,) uint64, those of one document after the other; see `shingles.py`
    shingle_ends.bin    (documents,) int64, where each document's shingles end
    identifiers.bin     the `id` of each document, UTF-8
    identifier_ends.bin (documents,) int64
    agreement.bin       (documents, hashes) uint8, the low byte of every MinHash, to estimate a similarity cheaply
    keys-BBB.bin        (documents with shingles,) uint64, their keys in band B, ascending
    documents-BBB.bin   (documents with shingles,) uint32, whose key it is, counted in this shard
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
        directory: of the shard; there when all is written, and not before.
        bands: how signatures are cut.
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
    def opened(self) -> Iterator[None]:
        """Write what is added meanwhile; a process that is killed leaves nothing that is believed."""
        with written_whole(self._directory) as partial:
            with (partial / "shingles.bin").open("wb") as self._shingles:
                yield
            self._finish(partial)

    def add(self, identifiers: Sequence[str], shingles: Shingles) -> None:
        """Add documents."""
        signatures = self._hasher.signatures(shingles)
        shingles.hashes.tofile(self._shingles)
        self._num_shingles.append(np.diff(shingles.starts))
        self._agreement.append(signatures.astype(np.uint8))
        self._keys.append(self._hasher.bucket_keys(signatures))
        self._identifiers.extend(identifier.encode() for identifier in identifiers)

    def _finish(self, partial: Path) -> None:
        num_shingles = np.concatenate(self._num_shingles)
        np.cumsum(num_shingles).tofile(partial / "shingle_ends.bin")
        (partial / "identifiers.bin").write_bytes(b"".join(self._identifiers))
        lengths = np.array([len(identifier) for identifier in self._identifiers], np.int64)
        np.cumsum(lengths).tofile(partial / "identifier_ends.bin")
        np.concatenate(self._agreement).tofile(partial / "agreement.bin")
        documents = np.flatnonzero(num_shingles).astype(np.uint32)
        keys = np.concatenate(self._keys)[documents]
        for band in range(self._bands.num_bands):
            order = np.argsort(keys[:, band], kind="stable")
            keys[order, band].tofile(partial / f"keys-{band:03d}.bin")
            documents[order].tofile(partial / f"documents-{band:03d}.bin")


class ShardSketches:
    """The sketches of one shard, mapped into memory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @cached_property
    def shingle_ends(self) -> Positions:
        """(documents,) int64."""
        return mapped(self._directory / "shingle_ends.bin", np.int64)

    @cached_property
    def _shingles(self) -> Hashes:
        return mapped(self._directory / "shingles.bin", np.uint64)

    @cached_property
    def _identifiers(self) -> tuple[NDArray[np.uint8], Positions]:
        names = ("identifiers.bin", np.uint8), ("identifier_ends.bin", np.int64)
        text, ends = (mapped(self._directory / name, kind) for name, kind in names)
        return text, ends

    @cached_property
    def agreement(self) -> NDArray[np.uint8]:
        """(documents, hashes) uint8."""
        flat = mapped(self._directory / "agreement.bin", np.uint8)
        return flat.reshape(len(self.shingle_ends), -1) if len(flat) else flat.reshape(0, 0)

    def num_shingles(self, documents: Positions) -> Positions:
        """Return (documents,) int64."""
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
        """Return the keys of a band from `lowest` to `highest`, ascending, and whose they are."""
        keys = mapped(self._directory / f"keys-{band:03d}.bin", np.uint64)
        documents = mapped(self._directory / f"documents-{band:03d}.bin", np.uint32)
        begin = int(np.searchsorted(keys, np.uint64(lowest), "left"))
        end = int(np.searchsorted(keys, np.uint64(highest), "right"))
        return keys[begin:end], documents[begin:end]


class Sketches:
    """The sketches of all shards.

    Args:
        work: holds them.
        names: of the shards, in the order that numbers the documents.
    """

    def __init__(self, work: Path, names: Sequence[str]) -> None:
        self.shards = [ShardSketches(work / SKETCHES / name) for name in names]
        sizes = [len(shard.shingle_ends) for shard in self.shards]
        self.first_documents = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)))
        """(shards + 1,) int64: the number of the first document of each shard, and of all documents."""

    @property
    def num_documents(self) -> int:
        """How many documents there are."""
        return int(self.first_documents[-1])

    def shingles(self, document: int) -> Hashes:
        """Return the shingles of a document."""
        shard, place = self._locate(document)
        return shard.shingles(place)

    def identifier(self, document: int) -> str:
        """Return the `id` of a document."""
        shard, place = self._locate(document)
        return shard.identifier(place)

    def num_shingles(self, documents: Positions) -> Positions:
        """Return (documents,) int64 of ascending documents."""
        return np.concatenate([shard.num_shingles(inside) for shard, inside in self._by_shard(documents)])

    def agreement(self, documents: Positions) -> NDArray[np.uint8]:
        """Return (documents, hashes) uint8 of ascending documents."""
        return np.concatenate([shard.agreement[inside] for shard, inside in self._by_shard(documents)])

    def _by_shard(self, documents: Positions) -> Iterator[tuple[ShardSketches, Positions]]:
        """Cut ascending documents at the shards."""
        borders = np.searchsorted(documents, self.first_documents)
        for number, shard in enumerate(self.shards):
            if borders[number] < borders[number + 1]:
                yield shard, documents[borders[number] : borders[number + 1]] - self.first_documents[number]

    def _locate(self, document: int) -> tuple[ShardSketches, int]:
        number = int(np.searchsorted(self.first_documents, document, "right")) - 1
        return self.shards[number], document - int(self.first_documents[number])


def _begin(ends: Positions, place: int) -> int:
    return int(ends[place - 1]) if place else 0


def mapped(path: Path, kind: type[np.generic] | np.dtype[np.void]) -> NDArray:
    """Map a raw array into memory: what is not read costs nothing."""
    # An empty file cannot be mapped.
    return np.asarray(np.memmap(path, kind, "r")) if path.stat().st_size else np.zeros(0, kind)


@contextmanager
def written_whole(directory: Path) -> Iterator[Path]:
    """Fill a directory beside its place, and put it there when it is complete."""
    partial = directory.with_name(f"{directory.name}.partial")
    for left_behind in (partial, directory):
        shutil.rmtree(left_behind, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    partial.rename(directory)


@contextmanager
def written_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file beside its place, and put it there when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        yield file
    partial.rename(path)
