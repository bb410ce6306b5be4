"""Encoding: pieces of text become tokens, on all cores, while the next ones are read and the last ones written."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Self

import numpy as np
from tokenizers import Tokenizer

from meshtrain.data.documents import DocumentReader, Piece
from meshtrain.data.tokenizer import TokenizerFiles, use_all_cores

BATCH_BYTES = 1 << 20
CORES_PER_ENCODER = 8
MOST_ENCODERS = 8


@dataclass(frozen=True)
class EncodedBatch:
    """Consecutive pieces as tokens."""

    tokens: np.ndarray
    """(tokens,) int64, of all pieces one after another."""
    lengths: np.ndarray
    """(pieces,) int64: tokens per piece."""
    num_bytes: np.ndarray
    """(pieces,) int64: bytes of text per piece."""
    ends_document: np.ndarray
    """(pieces,) bool."""
    is_held_out: np.ndarray
    """(pieces,) bool."""
    disk_bytes: int
    """How much of the files was read for this batch."""

    def select(self, chosen: np.ndarray) -> Self:
        """Return the pieces that are `chosen`, (pieces,) bool."""
        return type(self)(
            tokens=self.tokens[np.repeat(chosen, self.lengths)],
            lengths=self.lengths[chosen],
            num_bytes=self.num_bytes[chosen],
            ends_document=self.ends_document[chosen],
            is_held_out=self.is_held_out[chosen],
            disk_bytes=self.disk_bytes,
        )


def encode_documents(reader: DocumentReader, tokenizer: TokenizerFiles) -> Iterator[EncodedBatch]:
    """Encode all pieces of `reader`, in order, without special tokens.

    `encode_batch_fast` spreads a batch over all cores and lets go of the interpreter meanwhile. A second batch under
    way keeps the cores busy where the first one runs out, and hides reading and writing.
    """
    loaded = tokenizer.load()
    encoders = min(MOST_ENCODERS, max(2, (os.cpu_count() or 1) // CORES_PER_ENCODER))
    pending: deque[Future[EncodedBatch]] = deque()
    with use_all_cores(), ThreadPoolExecutor(encoders) as pool:
        disk_bytes = 0
        for pieces in _batches(reader):
            pending.append(pool.submit(_encode, loaded, pieces, reader.disk_bytes - disk_bytes))
            disk_bytes = reader.disk_bytes
            if len(pending) > encoders:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    num_bytes = 0
    for piece in pieces:
        batch.append(piece)
        num_bytes += piece.num_bytes
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _encode(tokenizer: Tokenizer, pieces: list[Piece], disk_bytes: int) -> EncodedBatch:
    texts, num_bytes, ends_document, is_held_out = zip(*pieces, strict=True)
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
    tokens = np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), np.int64, int(lengths.sum()))
    return EncodedBatch(
        tokens, lengths, np.array(num_bytes), np.array(ends_document), np.array(is_held_out), disk_bytes
    )
