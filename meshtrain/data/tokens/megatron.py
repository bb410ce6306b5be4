"""Corpora of Megatron-LM: pairs of files, NAME.bin and NAME.idx, which are read and written.

NAME.bin holds tokens and nothing else. NAME.idx, all little-endian:
    bytes 0-8   MAGIC
    9-16        uint64, the version, 1
    17          uint8, the type of the tokens, TOKEN_TYPES
    18-25       uint64, the number of sequences
    26-33       uint64, the number of document borders, one more than documents
    then        int32, the number of tokens of each sequence
                int64, the byte of NAME.bin where each sequence starts
                int64, the document borders, counted in sequences
A multimodal corpus has an int8 per sequence after that. It is refused.

Source: megatron/core/datasets/indexed_dataset.py of NVIDIA/Megatron-LM.
"""

import json
import struct
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from meshtrain.data.cache import Cache, compute_identity
from meshtrain.data.text.content_hashes import content_hashes
from meshtrain.data.text.sources import inspect_file
from meshtrain.data.tokens.scanning import progress_if_long, scan_tokens
from meshtrain.data.tokens.token_file import ArrayFile, TokenCounts, TokenFile, check_size, describe_other_tokenizer
from meshtrain.data.tokens.tokenizer import TokenizerFiles
from meshtrain.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
FLOAT_TYPES = {6: "float64", 7: "float32"}
READING_VERSION = 1
ENTRIES_PER_READ = 1 << 20
ADVICE = "copy both files again, or write them again"
RECORD = "tokenize.json"
"""The file in which `meshtrain tokenize` records how it made a pair."""


@dataclass(frozen=True)
class MegatronIndex:
    """An .idx file, memory-mapped."""

    path: Path
    token_type: np.dtype
    lengths: np.ndarray
    """(sequences,) int32: tokens of each."""
    pointers: np.ndarray
    """(sequences,) int64: the first byte of each in the .bin file."""
    borders: np.ndarray
    """(documents + 1,) int64: the first sequence of each document, then the number of sequences."""

    @classmethod
    def open(cls, path: Path) -> "MegatronIndex":
        """Map an index into memory, after checking its header and its size.

        Raises:
            DataError: if it is not an index, or of a kind that is not supported.
        """
        if not path.is_file():
            raise DataError(f"{path} is missing, and without it {path.with_suffix('.bin')} cannot be read", ADVICE)
        with path.open("rb") as stream:
            header = stream.read(HEADER.size)
        if not header.startswith(MAGIC):
            raise DataError(f"{path}, byte 0: {header[:9]!r} where an index begins with {MAGIC!r}", ADVICE)
        if len(header) < HEADER.size:
            raise DataError(f"{path} ends after {len(header)} bytes, within its header", ADVICE)
        _, index_version, code, num_sequences, num_borders = HEADER.unpack(header)
        if index_version != 1:
            raise DataError(
                f"{path}, byte 9: version {index_version} of the index, and only version 1 is supported", ADVICE
            )
        if code not in TOKEN_TYPES:
            found = FLOAT_TYPES.get(code, "unknown")
            raise DataError(f"{path}, byte 17: the type {code} of its tokens is {found}", ADVICE)
        _check_length(path, num_sequences, num_borders)
        starts = HEADER.size + np.cumsum([0, 4 * num_sequences, 8 * num_sequences])
        arrays = [
            np.memmap(path, kind, "r", offset=int(start), shape=(size,)) if size else np.zeros(0, kind)
            for kind, start, size in zip(
                ("<i4", "<i8", "<i8"), starts, (num_sequences, num_sequences, num_borders), strict=True
            )
        ]
        return cls(path, np.dtype(TOKEN_TYPES[code]).newbyteorder("<"), *arrays)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the .bin file."""
        if not len(self.lengths):
            return 0
        return int(self.pointers[-1]) // self.token_type.itemsize + int(self.lengths[-1])

    def check(self) -> None:
        """Check that each sequence and each document starts where the one before it ends.

        Raises:
            DataError: names the first that does not, and its position in the file.
        """
        expected = 0
        for first in range(0, len(self.lengths), ENTRIES_PER_READ):
            lengths = self.lengths[first : first + ENTRIES_PER_READ].astype(np.int64)
            if (lengths < 0).any():
                number = first + int((lengths < 0).argmax())
                self._fail(HEADER.size + 4 * number, f"sequence {number:,} has {self.lengths[number]:,} tokens")
            ends = expected + np.cumsum(lengths * self.token_type.itemsize)
            starts = np.append(expected, ends[:-1])
            is_wrong = self.pointers[first : first + ENTRIES_PER_READ] != starts
            if is_wrong.any():
                number = first + int(is_wrong.argmax())
                found, right = int(self.pointers[number]), int(starts[number - first])
                byte = HEADER.size + 4 * len(self.lengths) + 8 * number
                self._fail(byte, f"sequence {number:,} starts at byte {found:,} of the .bin file and not at {right:,}")
            expected = int(ends[-1])
        self._check_borders()

    def _check_borders(self) -> None:
        byte = HEADER.size + 12 * len(self.lengths)
        if not len(self.borders) or self.borders[0] != 0:
            self._fail(byte, "the first document does not start with sequence 0")
        for first in range(0, len(self.borders), ENTRIES_PER_READ):
            steps = np.diff(self.borders[first : first + ENTRIES_PER_READ + 1])
            if (steps < 0).any():
                number = first + int((steps < 0).argmax())
                self._fail(byte + 8 * (number + 1), f"document {number:,} ends before it starts")
        if self.borders[-1] != len(self.lengths):
            found = f"the last document ends with sequence {int(self.borders[-1]):,} of {len(self.lengths):,}"
            self._fail(byte + 8 * (len(self.borders) - 1), found)

    def _fail(self, byte: int, found: str) -> None:
        raise DataError(f"{self.path}, byte {byte:,}: {found}", ADVICE)

    def offsets(self) -> np.ndarray:
        """Return the first token of each non-empty document, then the number of tokens."""
        ends = np.append(np.asarray(self.pointers) // self.token_type.itemsize, self.num_tokens)
        return np.unique(ends[self.borders])


def is_megatron(path: Path) -> bool:
    """Return whether a path names a pair: a file of it, or their common name without ending."""
    prefix = pair_prefix(path)
    return (path.suffix in (".bin", ".idx") and path.is_file()) or (
        not path.exists() and _add_ending(prefix, ".bin").is_file() and _add_ending(prefix, ".idx").is_file()
    )


def pair_prefix(path: Path) -> Path:
    """Return the name of a pair without .bin and .idx."""
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def open_megatron(path: Path, tokenizer: TokenizerFiles, cache: Cache) -> TokenFile:
    """Open a pair as a token file.

    What the pair does not state is computed once, and kept in the cache.

    Documents without a token are left out. A pair does not state with which tokenizer it was
    written, unless `meshtrain tokenize` wrote it. Nor does it state whether an end token follows
    each document (`--append-eod`): `counts.ended_documents` is the number of documents with one.

    Args:
        path: either file, or their common name without endings.

    Raises:
        DataError: if the files do not match each other, or the tokens do not match the tokenizer.
    """
    prefix = pair_prefix(path)
    bin_path, idx_path = _add_ending(prefix, ".bin"), _add_ending(prefix, ".idx")
    index = MegatronIndex.open(idx_path)
    check_size(bin_path, index.num_tokens * index.token_type.itemsize, stated_in=str(idx_path))
    if not index.num_tokens:
        raise DataError(f"{bin_path} holds no tokens", "leave it out")
    hashes = content_hashes([inspect_file(path, "tokens") for path in (idx_path, bin_path)], cache)
    _check_record(prefix, hashes[1], tokenizer)
    name = f"megatron/{compute_identity(READING_VERSION, hashes, tokenizer.identity)}"
    cache.build(name, lambda directory: _describe(directory, index, bin_path, hashes, tokenizer))
    counts = TokenCounts.read(cache.directory / name)
    tokens = ArrayFile(bin_path, index.token_type, counts.tokens)
    offsets = ArrayFile(cache.directory / name / "documents.bin", np.dtype(np.int64), counts.documents + 1)
    return TokenFile(prefix, counts, tokens, offsets)


def _check_record(prefix: Path, tokens_hash: str, tokenizer: TokenizerFiles) -> None:
    """Check a pair against the record of `meshtrain tokenize`, if there is one.

    Raises:
        DataError: if it was written with another tokenizer.
    """
    try:
        recorded = json.loads((prefix.parent / RECORD).read_text())["parts"][prefix.name]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if recorded["tokens_hash"] == tokens_hash and recorded["tokenizer"] != tokenizer.identity:
        raise DataError(describe_other_tokenizer(prefix, recorded["tokenizer"], tokenizer))


def _describe(
    directory: Path, index: MegatronIndex, bin_path: Path, hashes: list[str], tokenizer: TokenizerFiles
) -> None:
    index.check()
    offsets = index.offsets()
    (directory / "documents.bin").write_bytes(offsets.tobytes())
    with progress_if_long(f"Checking {bin_path.name}", bin_path.stat().st_size) as advance:
        scan = scan_tokens(bin_path, index.token_type, offsets, tokenizer=tokenizer, advance=advance)
    TokenCounts(
        documents=len(offsets) - 1,
        tokens=index.num_tokens,
        ended_documents=scan.ended_documents,
        text_bytes=0,
        skipped_records=0,
        empty_documents=len(index.borders) - len(offsets),
        unigram_entropy_nats=scan.unigram_entropy_nats,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.identity,
        tokens_hash=hashes[1],
        documents_hash=scan.documents_hash,
        meshtrain=version("meshtrain"),
    ).write(directory)


def megatron_token_type(vocab_size: int) -> type[np.integer]:
    """Return the type of tokens that Megatron-LM uses for a vocabulary."""
    return np.uint16 if vocab_size < 65_500 else np.int32


def write_megatron_index(path: Path, offsets: np.ndarray, token_type: np.dtype) -> None:
    """Write the .idx file of tokens in which each document is one sequence.

    Args:
        offsets: (documents + 1,) int64: the first token of each document, then the number of
            tokens.

    Raises:
        DataError: if a document is too long for the format.
    """
    num_documents = len(offsets) - 1
    code = next(code for code, name in TOKEN_TYPES.items() if name == token_type.name)
    with path.open("wb") as stream:
        stream.write(HEADER.pack(MAGIC, 1, code, num_documents, num_documents + 1))
        for first in range(0, num_documents, ENTRIES_PER_READ):
            lengths = np.diff(offsets[first : first + ENTRIES_PER_READ + 1])
            if lengths.max() > np.iinfo(np.int32).max:
                number = first + int(lengths.argmax())
                raise DataError(
                    f"document {number:,} has {lengths.max():,} tokens, more than {path.name} can hold",
                    "cut it into several, or take --format meshtrain",
                )
            stream.write(lengths.astype("<i4").tobytes())
        for first in range(0, num_documents, ENTRIES_PER_READ):
            pointers = offsets[first : min(first + ENTRIES_PER_READ, num_documents)] * token_type.itemsize
            stream.write(pointers.astype("<i8").tobytes())
        for first in range(0, num_documents + 1, ENTRIES_PER_READ):
            stream.write(np.arange(first, min(first + ENTRIES_PER_READ, num_documents + 1), dtype="<i8").tobytes())


def _check_length(path: Path, num_sequences: int, num_borders: int) -> None:
    expected = HEADER.size + 12 * num_sequences + 8 * num_borders
    found = path.stat().st_size
    if found == expected + num_sequences and num_sequences:
        raise DataError(
            f"{path} is of a multimodal corpus (with images, for example), which is not supported", "name another"
        )
    if found != expected:
        raise DataError(
            f"{path} holds {found:,} bytes where its header, with {num_sequences:,} sequences and {num_borders - 1:,} "
            f"documents, says {expected:,}",
            ADVICE,
        )


def _add_ending(prefix: Path, ending: str) -> Path:
    return prefix.with_name(prefix.name + ending)
