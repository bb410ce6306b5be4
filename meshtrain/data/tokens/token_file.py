"""The token file: a tokenized corpus, which is read through memory maps.

A token file is a directory:
    tokens.bin      the tokens of all documents, with the end token after each document;
                    uint16, or uint32 if the vocabulary is larger than 65,536
    documents.bin   int64: the first token of each document, then the number of tokens
    trained.bin     only if not every token is trained on: a byte for each token, 1 if it is
    weights.bin     only if documents have weights: float32 for each document
    counts.json     TokenCounts
Every document has 2 tokens or more. Documents without a token are left out and counted.
"""

import json
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from meshtrain.compat.numpy import read_at_random
from meshtrain.data.cache import Cache, compute_identity
from meshtrain.data.text.content_hashes import content_hashes
from meshtrain.data.text.sources import inspect_file
from meshtrain.data.tokens.tokenizer import TokenizerFiles
from meshtrain.errors import DataError, Problem

FORMAT_VERSION = 3
TRAIN, VALIDATION = "train", "validation"
FILE_NAMES = ("tokens.bin", "documents.bin", "counts.json")


@dataclass(frozen=True)
class TokenCounts:
    """The description of a token file, which is stored beside its arrays."""

    documents: int
    tokens: int
    """End tokens included."""
    ended_documents: int
    """Documents whose last token is the end token. Megatron-LM may write documents without one."""
    text_bytes: int
    """0: unknown."""
    skipped_records: int
    """Bad records of the corpus. Those of a corpus that was split are counted in its train part."""
    empty_documents: int
    """Documents of the corpus without a token. They too are counted in the train part."""
    unigram_entropy_nats: float
    """Per token: the loss of a model that knows only the frequency of each token."""
    vocab_size: int
    tokenizer: str
    """The identity of the tokenizer."""
    tokens_hash: str
    """Of tokens.bin."""
    documents_hash: str
    """Of documents.bin."""
    meshtrain: str
    """The version of meshtrain that wrote it."""
    trained_tokens: int | None = None
    """Tokens that are trained on; None: all."""
    trained_hash: str | None = None
    """Of trained.bin, if there is one."""
    weights_hash: str | None = None
    """Of weights.bin, if there is one."""
    format: int = FORMAT_VERSION

    def write(self, directory: Path) -> None:
        """Write counts.json."""
        (directory / "counts.json").write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read counts.json.

        Raises:
            DataError: if it is not what this version writes.
        """
        path = directory / "counts.json"
        try:
            content: Any = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read ({error})", "tokenize again, or copy it again") from error
        # Files from before weights do not name them.
        if not isinstance(content, dict) or {*content, "weights_hash"} != {field.name for field in fields(cls)}:
            raise DataError(
                f"{path} is not of the format {FORMAT_VERSION} that this version reads",
                "tokenize again with meshtrain tokenize",
            )
        return cls(**content)


@dataclass(frozen=True)
class ArrayFile:
    """A file that holds a one-dimensional array. A process maps it only if it needs it."""

    path: Path
    dtype: np.dtype
    size: int

    def map(self) -> np.ndarray:
        """Map the file into memory, read-only.

        Readahead is off: samples are read at random offsets, so the kernel would fetch pages that
        are never used.
        """
        array = np.memmap(self.path, self.dtype, "r", shape=(self.size,))
        read_at_random(array)
        return array


@dataclass(frozen=True)
class TokenFile:
    """A token file.

    Its arrays are mapped on first use, because not every process needs all of them.
    """

    directory: Path
    """For a Megatron-LM pair: its name without .bin and .idx."""
    counts: TokenCounts
    tokens_file: ArrayFile
    offsets_file: ArrayFile
    trained_file: ArrayFile | None = None
    weights_file: ArrayFile | None = None

    @cached_property
    def tokens(self) -> np.ndarray:
        """(tokens,) uint16 or uint32; any integer type in a Megatron-LM pair."""
        return self.tokens_file.map()

    @cached_property
    def offsets(self) -> np.ndarray:
        """(documents + 1,) int64: document i is tokens[offsets[i] : offsets[i + 1]]."""
        return self.offsets_file.map()

    @cached_property
    def trained(self) -> np.ndarray | None:
        """(tokens,) bool: whether to train on predicting the token; None: all tokens are."""
        return None if self.trained_file is None else self.trained_file.map()

    @cached_property
    def weights(self) -> np.ndarray | None:
        """(documents,) float32: how much the tokens of a document count; None: all the same."""
        return None if self.weights_file is None else self.weights_file.map()

    @property
    def identity(self) -> str:
        """A hash of all its tokens, document borders and weights."""
        counts = self.counts
        weights = () if counts.weights_hash is None else (counts.weights_hash,)
        return compute_identity(
            counts.tokens_hash, counts.documents_hash, counts.trained_hash, counts.tokenizer, *weights
        )

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Open a token file after checking the sizes of its files.

        Raises:
            DataError: if a file is missing, of another size or of another format.
        """
        counts = TokenCounts.read(directory)
        token_type = np.dtype(smallest_token_type(counts.vocab_size))
        sizes = {"tokens.bin": counts.tokens * token_type.itemsize, "documents.bin": (counts.documents + 1) * 8}
        if counts.trained_hash is not None:
            sizes["trained.bin"] = counts.tokens
        if counts.weights_hash is not None:
            sizes["weights.bin"] = counts.documents * 4
        for name, size in sizes.items():
            check_size(directory / name, size, stated_in="counts.json")
        tokens = ArrayFile(directory / "tokens.bin", token_type, counts.tokens)
        offsets = ArrayFile(directory / "documents.bin", np.dtype(np.int64), counts.documents + 1)
        trained = None
        if counts.trained_hash is not None:
            trained = ArrayFile(directory / "trained.bin", np.dtype(np.bool_), counts.tokens)
        weights = None
        if counts.weights_hash is not None:
            weights = ArrayFile(directory / "weights.bin", np.dtype(np.float32), counts.documents)
        return cls(directory, counts, tokens, offsets, trained, weights)


def is_token_file(directory: Path) -> bool:
    """Return whether a directory is meant to be a token file. It may be damaged."""
    return all((directory / name).is_file() for name in FILE_NAMES[:2]) or (directory / FILE_NAMES[2]).is_file()


def is_complete(directory: Path) -> bool:
    """Return whether a directory is a token file that can be opened."""
    try:
        TokenFile.open(directory)
    except DataError:
        return False
    return True


def open_checked(directory: Path, tokenizer: TokenizerFiles, cache: Cache) -> TokenFile:
    """Open a token file that the user named, after checking its content and its tokenizer.

    The content is read once. The cache keeps its hash for as long as the files do not change.

    Args:
        tokenizer: the one that the model is trained with.

    Raises:
        DataError: if the content is damaged, or was written with another tokenizer.
    """
    file = TokenFile.open(directory)
    if file.counts.tokenizer != tokenizer.identity:
        raise DataError(describe_other_tokenizer(directory, file.counts.tokenizer, tokenizer))
    declared_hashes = {
        "tokens.bin": file.counts.tokens_hash,
        "documents.bin": file.counts.documents_hash,
        "trained.bin": file.counts.trained_hash,
        "weights.bin": file.counts.weights_hash,
    }
    names = [name for name, declared in declared_hashes.items() if declared is not None]
    hashes = content_hashes([inspect_file(directory / name, "tokens") for name in names], cache)
    for name, found in zip(names, hashes, strict=True):
        declared = declared_hashes[name]
        if found != declared:
            raise DataError(
                f"{directory / name} is damaged: its content is not what counts.json says (xxh3 {found}, not "
                f"{declared})",
                "copy it again, or tokenize again",
            )
    return file


def describe_other_tokenizer(path: Path, identity: str, tokenizer: TokenizerFiles) -> Problem:
    """Return the problem of tokens that were written with another tokenizer.

    Args:
        path: the tokens.
        identity: the tokenizer that they were written with.
    """
    return Problem(
        f"{path} was tokenized with another tokenizer (identity {identity[:12]}) than {tokenizer.directory} (identity "
        f"{tokenizer.identity[:12]}): its tokens would mean other text",
        f"name the tokenizer it was made with as {tokenizer.setting}, or tokenize again",
    )


def check_size(path: Path, size: int, *, stated_in: str) -> None:
    """Check that a file exists and has the right size.

    Args:
        size: in bytes.
        stated_in: where the size comes from, for the message.

    Raises:
        DataError: if it is missing or of another size.
    """
    if not path.is_file():
        raise DataError(f"{path} is missing", "copy it again, or tokenize again")
    found = path.stat().st_size
    if found != size:
        trouble = "it was cut short" if found < size else "it belongs to something else"
        raise DataError(
            f"{path} holds {found:,} bytes where {stated_in} says {size:,}: {trouble}",
            "copy it again, or tokenize again",
        )


def smallest_token_type(vocab_size: int) -> type[np.unsignedinteger]:
    """Return the type of the tokens in the tokens.bin of a vocabulary."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32
