"""The token file: a corpus tokenised once, memory-mapped ever after.

A token file is a directory:
    tokens.bin      every token of every document, each document followed by the end token; uint16, or uint32 where the
                    vocabulary is larger than 65,536
    documents.bin   int64: where each document starts, and at the end the number of tokens
    counts.json     TokenCounts
Every document has 2 tokens or more: those that come out empty are left out and counted.
"""

import json
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Self

import numpy as np

from meshtrain import console
from meshtrain.data.cache import Cache, identity_of
from meshtrain.data.documents import Corpus, DocumentReader
from meshtrain.data.encoding import EncodedBatch, encode_documents
from meshtrain.data.tokenizer import TokenizerFiles
from meshtrain.errors import DataError

FORMAT_VERSION = 1
TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True)
class TokenCounts:
    """What a token file says about itself."""

    documents: int
    tokens: int
    """End tokens included."""
    text_bytes: int
    skipped_records: int
    """Broken records of the corpus; those of a corpus that was split are counted in its train part."""
    empty_documents: int
    """Documents of the corpus that became no token; counted in the train part as well."""
    unigram_entropy_nats: float
    """Per token: the loss of a model that knows only how frequent each token is."""
    vocab_size: int
    tokenizer: str
    """The identity of the tokenizer."""
    meshtrain: str
    """The version that wrote it."""


@dataclass(frozen=True)
class TokenFile:
    """An open token file."""

    directory: Path
    counts: TokenCounts
    tokens: np.ndarray
    """(tokens,) uint16 or uint32, memory-mapped."""
    offsets: np.ndarray
    """(documents + 1,) int64, memory-mapped: document i is tokens[offsets[i] : offsets[i + 1]]."""
    trained: np.ndarray | None = None
    """(tokens,) bool, memory-mapped: whether to train on foretelling the token; None: on all of them."""

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Map a token file into memory."""
        counts = TokenCounts(**json.loads((directory / "counts.json").read_text()))
        tokens = np.memmap(directory / "tokens.bin", _token_type(counts.vocab_size), "r", shape=(counts.tokens,))
        offsets = np.memmap(directory / "documents.bin", np.int64, "r", shape=(counts.documents + 1,))
        return cls(directory, counts, tokens, offsets)


def prepare_token_files(
    corpus: Corpus, tokenizer: TokenizerFiles, cache: Cache, *, description: str
) -> tuple[dict[str, TokenFile], bool]:
    """Tokenise a corpus, unless the cache has it.

    Args:
        description: what the progress bar says.

    Returns:
        The token files by part (TRAIN, and VALIDATION if documents are held out), and whether they had to be built.

    Raises:
        DataError: if a document cannot be read, a part comes out empty, or the cache cannot be written.
    """
    parts = [TRAIN, VALIDATION] if corpus.held_out else [TRAIN]
    name = f"tokens/{identity_of(FORMAT_VERSION, corpus.identity, tokenizer.identity)}"

    def is_whole(directory: Path) -> bool:
        return all(_is_whole(directory / part) for part in parts)

    fill = partial(_tokenise, corpus=corpus, tokenizer=tokenizer, parts=parts, description=description)
    built = cache.build(name, fill, is_whole=is_whole)
    return {part: TokenFile.open(cache.directory / name / part) for part in parts}, built


def _is_whole(directory: Path) -> bool:
    counts_file = directory / "counts.json"
    if not counts_file.exists():
        return False
    counts = TokenCounts(**json.loads(counts_file.read_text()))
    sizes = {
        "tokens.bin": counts.tokens * np.dtype(_token_type(counts.vocab_size)).itemsize,
        "documents.bin": (counts.documents + 1) * 8,
    }
    files = {name: directory / name for name in sizes}
    return all(files[name].exists() and files[name].stat().st_size == size for name, size in sizes.items())


def _token_type(vocab_size: int) -> type[np.unsignedinteger]:
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def _tokenise(
    directory: Path, *, corpus: Corpus, tokenizer: TokenizerFiles, parts: list[str], description: str
) -> None:
    reader = DocumentReader(corpus)
    writers = [_Writer(directory / part, tokenizer) for part in parts]
    with console.progress(description, corpus.num_bytes, unit="MB") as advance:
        for batch in encode_documents(reader, tokenizer):
            if corpus.held_out:
                writers[0].write(batch.select(~batch.is_held_out))
                writers[1].write(batch.select(batch.is_held_out))
            else:
                writers[0].write(batch)
            advance(batch.disk_bytes)
    corpus.check_unchanged()
    empty_documents = reader.empty_documents + sum(writer.empty_documents for writer in writers)
    _check_not_empty(corpus, [writer.num_documents for writer in writers], reader.skipped_records, empty_documents)
    for writer, skipped, empty in zip(writers, (reader.skipped_records, 0), (empty_documents, 0), strict=False):
        writer.close(tokenizer, skipped_records=skipped, empty_documents=empty)


def _check_not_empty(corpus: Corpus, documents: list[int], skipped_records: int, empty_documents: int) -> None:
    if min(documents) > 0:
        return
    where = str(corpus.files[0].path) if len(corpus.files) == 1 else f"{corpus.files[0].path} and the files after it"
    if sum(documents):
        raise DataError(
            f"{where}: {sum(documents):,} documents cannot be parted by data.validation = {corpus.held_out}; "
            "set data.validation to files of its own, or to 0"
        )
    raise DataError(
        f"{where}: no text found, but {empty_documents:,} empty documents and {skipped_records:,} skipped records; "
        f"check the files and data.text_key, which is {json.dumps(corpus.text_key)}"
    )


class _Writer:
    """Writes one token file, batch by batch."""

    def __init__(self, directory: Path, tokenizer: TokenizerFiles) -> None:
        directory.mkdir()
        self.num_documents = 0
        self.empty_documents = 0
        self._directory = directory
        self._end_id = tokenizer.end_id
        self._token_type = _token_type(tokenizer.vocab_size)
        self._frequencies = np.zeros(tokenizer.vocab_size, np.int64)
        self._text_bytes = 0
        self._whole_tokens = 0
        self._open_tokens = 0
        self._append("tokens.bin", np.zeros(0, self._token_type))
        self._append("documents.bin", np.zeros(1, np.int64))

    def write(self, batch: EncodedBatch) -> None:
        """Append the pieces of a batch, and the end token after each piece that ends a document."""
        # Within the tokens of this batch; the first document may have begun in a batch before, the last may go on.
        borders = np.append(-self._open_tokens, np.cumsum(batch.lengths)[batch.ends_document])
        self._open_tokens = len(batch.tokens) - int(borders[-1])
        lengths = np.diff(borders)
        kept = lengths > 0
        tokens = np.insert(batch.tokens, borders[1:][kept], self._end_id)
        self._frequencies += np.bincount(tokens, minlength=len(self._frequencies))
        self._append("tokens.bin", tokens.astype(self._token_type))
        document_ends = self._whole_tokens + np.cumsum(lengths[kept] + 1)
        self._append("documents.bin", document_ends)
        self._whole_tokens += int((lengths[kept] + 1).sum())
        self._text_bytes += int(batch.num_bytes.sum())
        self.num_documents += int(kept.sum())
        self.empty_documents += int((~kept).sum())

    def close(self, tokenizer: TokenizerFiles, *, skipped_records: int, empty_documents: int) -> None:
        """Write what the files hold."""
        counts = TokenCounts(
            documents=self.num_documents,
            tokens=self._whole_tokens,
            text_bytes=self._text_bytes,
            skipped_records=skipped_records,
            empty_documents=empty_documents,
            unigram_entropy_nats=_entropy_nats(self._frequencies),
            vocab_size=tokenizer.vocab_size,
            tokenizer=tokenizer.identity,
            meshtrain=version("meshtrain"),
        )
        (self._directory / "counts.json").write_text(json.dumps(asdict(counts), indent=2) + "\n")

    def _append(self, name: str, values: np.ndarray) -> None:
        with (self._directory / name).open("ab") as stream:
            stream.write(values.tobytes())


def _entropy_nats(frequencies: np.ndarray) -> float:
    probabilities = frequencies[frequencies > 0] / frequencies.sum()
    return float(-(probabilities * np.log(probabilities)).sum())
