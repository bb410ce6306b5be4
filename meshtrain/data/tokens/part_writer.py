"""Writing one token file block by block, so that writing can resume after any block."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from meshtrain.data.tokens.encoding import EncodedBlock

WEIGHT_BYTES = 4


@dataclass(frozen=True)
class PartState:
    """How much of a token file has been written."""

    documents: int = 0
    tokens: int = 0
    """Tokens of complete documents, end tokens included."""
    open_tokens: int = 0
    """Tokens of a document that is not complete yet."""
    text_bytes: int = 0
    empty_documents: int = 0
    """Documents with text but without a token."""


class PartWriter:
    """Appends to a token file; a context manager.

    Args:
        directory: created if it is missing.
        state: how much of the files in it to keep.
        end_id: written after each document.
        has_marks: whether the blocks mark what is trained on.
        has_weights: whether the blocks have weights of documents.
    """

    def __init__(
        self,
        directory: Path,
        token_type: np.dtype,
        end_id: int,
        state: PartState,
        *,
        has_marks: bool,
        has_weights: bool,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.state = state
        self._end_id = end_id
        sizes = file_sizes(state, token_type, has_marks=has_marks, has_weights=has_weights)
        self._streams = {name: _open_at(directory / name, size) for name, size in sizes.items()}
        self._tokens, self._documents = self._streams["tokens.bin"], self._streams["documents.bin"]
        if not self._documents.tell():
            self._documents.write(np.zeros(1, np.int64).tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for stream in self._streams.values():
            stream.close()

    def write(self, block: EncodedBlock) -> None:
        """Append texts, and the end token after each that ends a document."""
        # The first document may have begun in an earlier block, and the last may continue in the
        # next.
        borders = np.append(-self.state.open_tokens, np.cumsum(block.lengths)[block.ends_document])
        lengths = np.diff(borders)
        kept = lengths > 0
        end_positions = borders[1:][kept]
        self._tokens.write(np.insert(block.tokens, end_positions, self._end_id).tobytes())
        if block.trained is not None:
            # The end token after trained text is trained on, unless a template has put an end token
            # there already.
            learns_end = block.trained[end_positions - 1] & (block.tokens[end_positions - 1] != self._end_id)
            self._streams["trained.bin"].write(np.insert(block.trained, end_positions, learns_end).tobytes())
        if block.weights is not None:
            self._streams["weights.bin"].write(block.weights[kept].tobytes())
        ends = self.state.tokens + np.cumsum(lengths[kept] + 1)
        self._documents.write(ends.tobytes())
        self.state = replace(
            self.state,
            documents=self.state.documents + int(kept.sum()),
            tokens=int(ends[-1]) if len(ends) else self.state.tokens,
            open_tokens=len(block.tokens) - int(borders[-1]),
            text_bytes=self.state.text_bytes + int(block.num_bytes.sum()),
            empty_documents=self.state.empty_documents + int((~kept).sum()),
        )

    def flush(self) -> None:
        """Write all buffered bytes to disk."""
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())


def file_sizes(state: PartState, token_type: np.dtype, *, has_marks: bool, has_weights: bool) -> dict[str, int]:
    """Return file name -> size in bytes, for a token file in this state."""
    num_tokens = state.tokens + state.open_tokens
    sizes = {
        "tokens.bin": num_tokens * token_type.itemsize,
        "documents.bin": (state.documents + 1) * 8 if state != PartState() else 0,
    }
    sizes |= {"trained.bin": num_tokens} if has_marks else {}
    return sizes | ({"weights.bin": state.documents * WEIGHT_BYTES} if has_weights else {})


def _open_at(path: Path, size: int) -> BinaryIO:
    stream = path.open("r+b" if path.exists() else "w+b")
    stream.truncate(size)
    stream.seek(size)
    return stream
