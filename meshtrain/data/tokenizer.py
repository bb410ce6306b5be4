"""Tokenizers: an existing one, or a byte-level BPE trained once on the training documents.

Either way the result is a directory that `AutoTokenizer.from_pretrained` loads and that an export can copy.
"""

import heapq
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from xxhash import xxh3_64_intdigest

from meshtrain import console
from meshtrain.config.paths import is_hub_id
from meshtrain.data.cache import Cache, identity_of
from meshtrain.data.corpus_files import Corpus
from meshtrain.data.documents import DocumentReader
from meshtrain.errors import DataError, name_some

END_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"

KNOWN_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""What is taken for the end token of a tokenizer that does not say."""

TOKENIZER_FILE_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)

TRAINING_BYTES = 64 << 20
"""A BPE learns next to nothing from more text than this, but its memory and time grow with it."""

NO_LENGTH_LIMIT = int(1e30)
"""How Hugging Face writes that a tokenizer sets no limit."""

TRAINING_VERSION = 1
"""Counts the ways in which the same documents have led to a tokenizer."""


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer on disk in Hugging Face format, and what training asks of it."""

    directory: Path
    vocab_size: int
    """The largest token id + 1: what the model's vocabulary must have room for."""
    end_id: int
    """The token that follows every document."""
    pad_id: int
    """Fills samples up. A tokenizer without one, as GPT-2's, pads with the end token: the labels tell them apart."""
    identity: str
    """A hash of all that decides which tokens a text becomes."""

    def load(self) -> Tokenizer:
        """Load the tokenizer without the truncation and padding that its file may ask for."""
        return _load_tokenizer(self.directory / "tokenizer.json")

    def copy(self, directory: Path) -> None:
        """Copy the tokenizer into an existing directory, without what else lies beside it, such as a model."""
        for name in TOKENIZER_FILE_NAMES:
            if (self.directory / name).is_file():
                shutil.copyfile(self.directory / name, directory / name)


@contextmanager
def use_all_cores() -> Iterator[None]:
    """Let tokenizers work in parallel, whatever the environment said; its only switch is this variable."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def find_tokenizer(path: str, cache: Cache) -> TokenizerFiles:
    """Find an existing tokenizer: a directory, a tokenizer.json, or a hub id.

    Where no end token is declared, a directory that declares the one that was found is made in the cache.

    Raises:
        DataError: if it is missing or broken, or has no end token.
    """
    file = _locate(path)
    settings = _settings(file.parent)
    tokenizer = _load_tokenizer(file)
    end_token = settings.get("eos_token")
    if end_token is not None:
        return _tokenizer_files(file, tokenizer, settings)
    end_token = next((token for token in KNOWN_END_TOKENS if tokenizer.token_to_id(token) is not None), None)
    if end_token is None:
        raise DataError(
            f'the tokenizer {file.parent} has no end token, which separates documents: looked for "eos_token" in '
            "tokenizer_config.json and special_tokens_map.json, "
            f"and for {', '.join(KNOWN_END_TOKENS)} in its vocabulary; "
            'name it as "eos_token" in tokenizer_config.json'
        )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings, "eos_token": end_token}
    text = file.read_text(encoding="utf-8")
    name = f"tokenizers/{identity_of(text, settings)}"
    cache.build(name, lambda directory: _write(directory, text, settings))
    return _tokenizer_files(cache.directory / name / "tokenizer.json", tokenizer, settings)


def train_tokenizer(corpus: Corpus, vocab_size: int, cache: Cache) -> TokenizerFiles:
    """Train a byte-level BPE on the documents of `corpus` that are not held out, unless the cache has it.

    The same documents give the same tokenizer, byte for byte, on every machine.

    Args:
        vocab_size: the size to reach; a small text may have too few different words for it.

    Raises:
        DataError: if a document cannot be read.
    """
    name = f"tokenizers/{identity_of(TRAINING_VERSION, TRAINING_BYTES, corpus.identity, vocab_size)}"
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_TOKEN,
        "eos_token": END_TOKEN,
        "unk_token": END_TOKEN,
        "pad_token": PAD_TOKEN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": NO_LENGTH_LIMIT,
    }
    cache.build(name, lambda directory: _write(directory, _train(corpus, vocab_size).to_str(), settings))
    file = cache.directory / name / "tokenizer.json"
    return _tokenizer_files(file, _load_tokenizer(file), settings)


def _train(corpus: Corpus, vocab_size: int) -> Tokenizer:
    console.line(f"Training a byte-level BPE of {vocab_size:,} tokens")
    texts = _training_sample(corpus)
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


def _training_sample(corpus: Corpus) -> Iterator[str]:
    """Return the pieces that come first in a pseudo-random order, TRAINING_BYTES of them, in corpus order."""
    kept: list[tuple[int, int, int, str]] = []
    kept_bytes = 0
    pieces = (piece for piece in DocumentReader(corpus) if not piece.is_held_out)
    for number, piece in enumerate(pieces):
        priority = xxh3_64_intdigest(number.to_bytes(8, "little"))
        heapq.heappush(kept, (-priority, number, piece.num_bytes, piece.text))
        kept_bytes += piece.num_bytes
        while kept_bytes > TRAINING_BYTES:
            kept_bytes -= heapq.heappop(kept)[2]
    return (text for _, _, _, text in sorted(kept, key=lambda entry: entry[1]))


def _locate(path: str) -> Path:
    place = Path(path) if Path(path).exists() or not is_hub_id(path) else _hub_directory(path)
    if place.is_file():
        return place
    if not place.is_dir():
        raise DataError(
            f"data.tokenizer.path: {path} does not exist; name a Hugging Face directory, a tokenizer.json or a hub id, "
            "or set data.tokenizer.vocab_size to train one"
        )
    if not (place / "tokenizer.json").is_file():
        names = sorted(entry.name for entry in place.iterdir())
        raise DataError(
            f"data.tokenizer.path: {place} holds no tokenizer.json but {name_some(names) or 'nothing'}; "
            "write one with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    return place / "tokenizer.json"


def _hub_directory(hub_id: str) -> Path:
    # Imported only where it is needed: it takes as long as all the rest of a start without torch.
    from huggingface_hub import snapshot_download, try_to_load_from_cache  # noqa: PLC0415

    # What the cache has is taken from there: a start must not wait for the hub, nor the text change with it.
    cached = try_to_load_from_cache(hub_id, "tokenizer.json")
    if isinstance(cached, str):
        return Path(cached).parent
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(TOKENIZER_FILE_NAMES)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(
            f'data.tokenizer.path: "{hub_id}" is no path that exists, is not in the local hub cache, '
            f"and the hub cannot give it: {reason}"
        ) from error


def _settings(directory: Path) -> dict[str, Any]:
    """Return what the directory says about its tokenizer beside tokenizer.json."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = directory / name
        if file.is_file():
            try:
                said = json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise DataError(f"{file} is not JSON ({error}); fetch or save the tokenizer again") from error
            settings |= {key: value for key, value in said.items() if value is not None}
    return settings


def _load_tokenizer(file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise DataError(f"{file} is not a tokenizer ({error}); fetch or save it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _tokenizer_files(file: Path, tokenizer: Tokenizer, settings: dict[str, Any]) -> TokenizerFiles:
    end_id = _token_id(file, tokenizer, settings, "eos_token")
    pad_id = _token_id(file, tokenizer, settings, "pad_token") if settings.get("pad_token") else end_id
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    identity = identity_of(file.read_text(encoding="utf-8"), end_id, pad_id)
    return TokenizerFiles(file.parent, vocab_size, end_id, pad_id, identity)


def _token_id(file: Path, tokenizer: Tokenizer, settings: dict[str, Any], role: str) -> int:
    declared = settings[role]
    token = declared["content"] if isinstance(declared, dict) else declared
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise DataError(
            f'the {role} "{token}" of the tokenizer {file.parent} is not in its vocabulary; '
            "correct tokenizer_config.json or take the tokenizer.json that belongs to it"
        )
    return int(token_id)


def _write(directory: Path, tokenizer: str, settings: dict[str, Any]) -> None:
    (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
