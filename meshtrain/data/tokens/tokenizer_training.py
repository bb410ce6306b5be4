"""Training a tokenizer: a byte-level BPE.

The same documents give the same tokenizer on every machine.
"""

import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from xxhash import xxh3_64_intdigest

from meshtrain import console
from meshtrain.data.cache import Cache, build_output, compute_identity
from meshtrain.data.text.corpus import COMMAND_OPTIONS, Corpus
from meshtrain.data.text.documents import DocumentReader
from meshtrain.data.text.sources import find_typed_files
from meshtrain.data.tokens.tokenizer import (
    TokenizerFiles,
    inspect_tokenizer,
    load_tokenizer,
    use_all_cores,
    write_tokenizer,
)
from meshtrain.errors import DataError, Problem

END_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"

TRAINING_BYTES = 64 << 20
"""More text than this changes a BPE little, but its memory and time grow with it."""

NO_LENGTH_LIMIT = int(1e30)
"""The value by which Hugging Face marks a tokenizer without a length limit."""

TRAINING_VERSION = 1
"""Raise this when the same documents give another tokenizer: the cache then builds it again."""

SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END_TOKEN,
    "eos_token": END_TOKEN,
    "unk_token": END_TOKEN,
    "pad_token": PAD_TOKEN,
    "clean_up_tokenization_spaces": False,
    "model_max_length": NO_LENGTH_LIMIT,
}


def train_tokenizer(corpora: Sequence[Corpus], vocab_size: int, cache: Cache) -> TokenizerFiles:
    """Train a byte-level BPE on documents that are not held out, unless the cache has it.

    The same documents give the same tokenizer, byte for byte, on every machine.

    Args:
        vocab_size: the size to reach; a small text may have too few different words to reach it.

    Raises:
        DataError: if a document cannot be read.
    """
    identities = [corpus.identity for corpus in corpora]
    name = f"tokenizers/{compute_identity(TRAINING_VERSION, TRAINING_BYTES, identities, vocab_size)}"

    def fill(directory: Path) -> None:
        # Skipped records are shown when the same corpora are tokenized.
        write_tokenizer(directory, _train(corpora, vocab_size, shows_problems=False).to_str(), SETTINGS)

    cache.build(name, fill)
    file = cache.directory / name / "tokenizer.json"
    return inspect_tokenizer(file, load_tokenizer(file), SETTINGS)


def _train(corpora: Sequence[Corpus], vocab_size: int, *, shows_problems: bool) -> Tokenizer:
    console.line(f"Training a byte-level BPE of {vocab_size:,} tokens")
    texts = _training_sample(corpora, shows_problems=shows_problems)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN, PAD_TOKEN],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    with use_all_cores():
        tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _training_sample(corpora: Sequence[Corpus], *, shows_problems: bool) -> Iterator[str]:
    """Return pseudo-randomly chosen pieces of TRAINING_BYTES in all, in corpus order."""
    kept: list[tuple[int, int, int, str]] = []
    kept_bytes = 0
    pieces = (
        piece
        for corpus in corpora
        for piece in DocumentReader(corpus, shows_problems=shows_problems)
        if not piece.is_held_out
    )
    for number, piece in enumerate(pieces):
        priority = xxh3_64_intdigest(number.to_bytes(8, "little"))
        heapq.heappush(kept, (-priority, number, piece.num_bytes, piece.text))
        kept_bytes += piece.num_bytes
        while kept_bytes > TRAINING_BYTES:
            kept_bytes -= heapq.heappop(kept)[2]
    return (text for _, _, _, text in sorted(kept, key=lambda entry: entry[1]))


def train_tokenizer_on_sources(
    sources: Sequence[str],
    vocab_size: int,
    output: Path,
    *,
    text_key: str = "text",
    on_bad_record: Literal["fail", "skip"] = "fail",
    num_documents: int | None = None,
) -> None:
    """Train a byte-level BPE on sources, and write it in Hugging Face format.

    Args:
        sources: as typed: paths and globs relative to the working directory.
        num_documents: read only this number of documents, from the first on; None: all.

    Raises:
        DataError: if a source or a document is wrong, or the output is there already.
    """
    taken = Problem(f"--output: {output} exists already", "remove it, or choose another directory")
    if output.exists():
        raise DataError(taken)
    files = tuple(find_typed_files(sources))
    corpus = Corpus(
        files,
        (),
        text_key=text_key,
        on_bad_record=on_bad_record,
        num_documents=num_documents,
        settings=COMMAND_OPTIONS,
    )

    def fill(directory: Path) -> None:
        write_tokenizer(directory, _train([corpus], vocab_size, shows_problems=True).to_str(), SETTINGS)

    output.parent.mkdir(parents=True, exist_ok=True)
    if not build_output(output, fill):
        raise DataError(taken)
    found = inspect_tokenizer(output / "tokenizer.json", load_tokenizer(output / "tokenizer.json"), SETTINGS).vocab_size
    console.line(f"Wrote {output}: {found:,} tokens")
    if found < vocab_size:
        console.warning(f"the text has too few different words for {vocab_size:,} tokens")
