"""The token file: a corpus tokenized once, memory-mapped ever after.

A token file is a directory:
    tokens.bin      every token of every document, each document followed by the end token; uint16, or uint32 where the
                    vocabulary is larger than 65,536
    documents.bin   int64: where each document starts, and at the end the number of tokens
    trained.bin     only where not every token is trained on: a byte for each, 1 if it is
    counts.json     TokenCounts
Every document has 2 tokens or more: those that come out empty are left out and counted.
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
from meshtrain.errors import DataError

FORMAT_VERSION = 3
TRAIN, VALIDATION = "train", "validation"
FILE_NAMES = ("tokens.bin", "documents.bin", "counts.json")


@dataclass(frozen=True)
class TokenCounts:
    """What a token file says about itself."""

    documents: int
    tokens: int
    """End tokens included."""
    ended_documents: int
    """Documents whose last token is the end token: all, or none of those that Megatron-LM wrote without them."""
    text_bytes: int
    """0: nobody knows."""
    skipped_records: int
    """Broken records of the corpus; those of a corpus that was split are counted in its train part."""
    empty_documents: int
    """Documents of the corpus that became no token; counted in the train part as well."""
    unigram_entropy_nats: float
    """Per token: the loss of a model that knows only how frequent each token is."""
    vocab_size: int
    tokenizer: str
    """The identity of the tokenizer."""
    tokens_hash: str
    """Of tokens.bin."""
    documents_hash: str
    """Of documents.bin."""
    meshtrain: str
    """The version that wrote it."""
    trained_tokens: int | None = None
    """Tokens that are trained on; None: all."""
    trained_hash: str | None = None
    """Of trained.bin, if there is one."""
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
            said: Any = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read ({error}); tokenize again, or copy it again") from error
        if not isinstance(said, dict) or set(said) != {field.name for field in fields(cls)}:
            raise DataError(
                f"{path} is not of the format {FORMAT_VERSION} that this version reads; "
                "tokenize again with meshtrain tokenize"
            )
        return cls(**said)


@dataclass(frozen=True)
class ArrayFile:
    """A file that is an array of one dimension, opened by who looks into it, and not before."""

    path: Path
    dtype: np.dtype
    size: int

    def map(self) -> np.ndarray:
        """Map it into memory, for who looks here and there: not for each row thirty pages that nobody asked for."""
        array = np.memmap(self.path, self.dtype, "r", shape=(self.size,))
        read_at_random(array)
        return array


@dataclass(frozen=True)
class TokenFile:
    """A token file. Its arrays are memory-mapped when they are first asked for: not every process needs all of them."""

    directory: Path
    """Of one that Megatron-LM wrote: its name without .bin and .idx."""
    counts: TokenCounts
    tokens_file: ArrayFile
    offsets_file: ArrayFile
    trained_file: ArrayFile | None = None

    @cached_property
    def tokens(self) -> np.ndarray:
        """(tokens,) uint16 or uint32; any integer, if Megatron-LM wrote it."""
        return self.tokens_file.map()

    @cached_property
    def offsets(self) -> np.ndarray:
        """(documents + 1,) int64: document i is tokens[offsets[i] : offsets[i + 1]]."""
        return self.offsets_file.map()

    @cached_property
    def trained(self) -> np.ndarray | None:
        """(tokens,) bool: whether to train on foretelling the token; None: on all of them."""
        return None if self.trained_file is None else self.trained_file.map()

    @property
    def identity(self) -> str:
        """A hash of all its tokens and borders."""
        return compute_identity(
            self.counts.tokens_hash, self.counts.documents_hash, self.counts.trained_hash, self.counts.tokenizer
        )

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Open a token file, if its files are as long as they should be.

        Raises:
            DataError: if a file is missing, of another length or of another format.
        """
        counts = TokenCounts.read(directory)
        token_type = np.dtype(smallest_token_type(counts.vocab_size))
        sizes = {"tokens.bin": counts.tokens * token_type.itemsize, "documents.bin": (counts.documents + 1) * 8}
        if counts.trained_hash is not None:
            sizes["trained.bin"] = counts.tokens
        for name, size in sizes.items():
            check_size(directory / name, size, said_by="counts.json")
        tokens = ArrayFile(directory / "tokens.bin", token_type, counts.tokens)
        offsets = ArrayFile(directory / "documents.bin", np.dtype(np.int64), counts.documents + 1)
        trained = None
        if counts.trained_hash is not None:
            trained = ArrayFile(directory / "trained.bin", np.dtype(np.bool_), counts.tokens)
        return cls(directory, counts, tokens, offsets, trained)


def is_token_file(directory: Path) -> bool:
    """Tell whether a directory is meant to be a token file; it may be damaged."""
    return all((directory / name).is_file() for name in FILE_NAMES[:2]) or (directory / FILE_NAMES[2]).is_file()


def is_complete(directory: Path) -> bool:
    """Tell whether a directory is a token file that can be opened."""
    try:
        TokenFile.open(directory)
    except DataError:
        return False
    return True


def open_checked(directory: Path, tokenizer: TokenizerFiles | None, cache: Cache) -> TokenFile:
    """Open a token file that somebody named: its content is what was written, and by the right tokenizer.

    The content is read once; the cache remembers it for as long as the files do not change.

    Args:
        tokenizer: that the model is trained with; None: any.

    Raises:
        DataError: if it is not.
    """
    file = TokenFile.open(directory)
    if tokenizer is not None and file.counts.tokenizer != tokenizer.identity:
        raise DataError(describe_other_tokenizer(directory, file.counts.tokenizer, tokenizer))
    all_said = {
        "tokens.bin": file.counts.tokens_hash,
        "documents.bin": file.counts.documents_hash,
        "trained.bin": file.counts.trained_hash,
    }
    names = [name for name, said in all_said.items() if said is not None]
    hashes = content_hashes([inspect_file(directory / name, "tokens") for name in names], cache)
    for name, found in zip(names, hashes, strict=True):
        said = all_said[name]
        if found != said:
            raise DataError(
                f"{directory / name} is damaged: its content is not what counts.json says (xxh3 {found}, not {said}); "
                "copy it again, or tokenize again"
            )
    return file


def describe_other_tokenizer(place: Path, identity: str, tokenizer: TokenizerFiles) -> str:
    """Say that tokens were written with another tokenizer than the one that they are to be read with."""
    return (
        f"{place} was tokenized with another tokenizer (identity {identity[:12]}) than "
        f"{tokenizer.directory} (identity {tokenizer.identity[:12]}): its tokens would stand for other words; "
        "name the tokenizer it was made with as data.tokenizer.path, or tokenize again"
    )


def check_size(path: Path, size: int, *, said_by: str) -> None:
    """Check that a file is as long as another one says.

    Raises:
        DataError: if it is missing or of another size.
    """
    if not path.is_file():
        raise DataError(f"{path} is missing; copy it again, or tokenize again")
    found = path.stat().st_size
    if found != size:
        trouble = "it was cut short" if found < size else "it is not the file that belongs to it"
        raise DataError(
            f"{path} holds {found:,} bytes where {said_by} says {size:,}: {trouble}; copy it again, or tokenize again"
        )


def smallest_token_type(vocab_size: int) -> type[np.unsignedinteger]:
    """Return the type of the tokens in tokens.bin."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32
