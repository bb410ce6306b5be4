"""Tokenizers on disk, which `AutoTokenizer.from_pretrained` loads and an export copies."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from meshtrain.config.data import TokenizerConfig
from meshtrain.config.paths import is_hub_id
from meshtrain.data.cache import Cache, compute_identity
from meshtrain.errors import DataError, name_some

KNOWN_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""The end tokens to look for in a tokenizer that declares none."""

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

TOKENIZER_KEY = "data.tokenizer.path"

TRAINING_ADVICE = {
    TOKENIZER_KEY: "set data.tokenizer.vocab_size to train one",
    "--tokenizer": "train one with meshtrain tokenizer train",
}
"""Setting that names a tokenizer -> what to do if there is none yet."""


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer on disk in Hugging Face format, and its properties that training needs."""

    directory: Path
    vocab_size: int
    """The largest token id + 1. The vocabulary of the model must have room for it."""
    end_id: int
    """The token that follows every document."""
    pad_id: int
    """Pads samples.

    It is the end token if the tokenizer has no pad token, like that of GPT-2. The labels
    distinguish the two.
    """
    identity: str
    """A hash of everything that decides which tokens a text becomes."""
    setting: str = TOKENIZER_KEY
    """How the user names the tokenizer, for messages: a key of a run file, or an option."""

    def load(self) -> Tokenizer:
        """Load the tokenizer, without the truncation and padding that its file may ask for."""
        return load_tokenizer(self.directory / "tokenizer.json")

    def copy(self, directory: Path) -> None:
        """Copy the files of the tokenizer, and no others beside them, into a directory."""
        for name in TOKENIZER_FILE_NAMES:
            if (self.directory / name).is_file():
                shutil.copyfile(self.directory / name, directory / name)


@contextmanager
def use_all_cores() -> Iterator[None]:
    """Let the tokenizers library use all cores. The environment variable is its only switch."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def find_tokenizer(path: str, cache: Cache, *, setting: str = TOKENIZER_KEY) -> TokenizerFiles:
    """Find an existing tokenizer: a directory, a tokenizer.json, or a hub id.

    If the directory declares no end token, a directory that declares the one that was found is made
    in the cache.

    Args:
        setting: how the user names the tokenizer, for messages.

    Raises:
        DataError: if it is missing or broken, or has no end token.
    """
    file = _locate(path, setting)
    settings = _settings(file.parent)
    tokenizer = load_tokenizer(file)
    end_token = settings.get("eos_token")
    if end_token is not None:
        return inspect_tokenizer(file, tokenizer, settings, setting=setting)
    end_token = next((token for token in KNOWN_END_TOKENS if tokenizer.token_to_id(token) is not None), None)
    if end_token is None:
        raise DataError(
            f'the tokenizer {file.parent} has no end token, which separates documents: looked for "eos_token" in '
            f"tokenizer_config.json and special_tokens_map.json, and for {', '.join(KNOWN_END_TOKENS)} in its "
            "vocabulary",
            'name it as "eos_token" in tokenizer_config.json',
        )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings, "eos_token": end_token}
    text = file.read_text(encoding="utf-8")
    name = f"tokenizers/{compute_identity(text, settings)}"
    cache.build(name, lambda directory: write_tokenizer(directory, text, settings))
    return inspect_tokenizer(cache.directory / name / "tokenizer.json", tokenizer, settings, setting=setting)


def open_tokenizer(config: TokenizerConfig, cache: Cache) -> TokenizerFiles:
    """Find the existing tokenizer of a run, with the special tokens that the run adds to it.

    Raises:
        DataError: if it is missing or broken, or has no end token.
    """
    assert config.path is not None
    found = find_tokenizer(config.path, cache)
    tokenizer = found.load()
    added = [token for token in dict.fromkeys(config.special_tokens) if tokenizer.token_to_id(token) is None]
    if not added:
        return found
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in added])
    settings, text = _settings(found.directory), tokenizer.to_str()
    # transformers keeps special tokens without a role here. Before its version 5, it was a list of
    # another name.
    known = settings.pop("additional_special_tokens", None) or settings.get("extra_special_tokens") or []
    if isinstance(known, list):
        settings["extra_special_tokens"] = [*known, *added]
    name = f"tokenizers/{compute_identity(text, settings)}"
    cache.build(name, lambda directory: write_tokenizer(directory, text, settings))
    return inspect_tokenizer(cache.directory / name / "tokenizer.json", tokenizer, settings)


def _locate(path: str, setting: str) -> Path:
    found = Path(path) if Path(path).exists() or not is_hub_id(path) else _hub_directory(path, setting)
    if found.is_file():
        return found
    if not found.is_dir():
        raise DataError(
            f"{setting}: {path} does not exist",
            f"name a Hugging Face directory, a tokenizer.json or a hub id, or {TRAINING_ADVICE[setting]}",
        )
    if not (found / "tokenizer.json").is_file():
        names = sorted(entry.name for entry in found.iterdir())
        raise DataError(
            f"{setting}: {found} holds {name_some(names) or 'nothing'}, but no tokenizer.json",
            "write one with AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
    return found / "tokenizer.json"


def _hub_directory(hub_id: str, setting: str) -> Path:
    # Imported only here, because it takes as long as the rest of a start without torch.
    from huggingface_hub import snapshot_download, try_to_load_from_cache  # noqa: PLC0415

    # A cached tokenizer is used as it is. A start must not wait for the hub, and its result must
    # not change with it.
    cached = try_to_load_from_cache(hub_id, "tokenizer.json")
    if isinstance(cached, str):
        return Path(cached).parent
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(TOKENIZER_FILE_NAMES)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(
            f'{setting}: "{hub_id}" does not exist as a path, is not in the local hub cache, and the hub does not '
            f"provide it: {reason}"
        ) from error


def _settings(directory: Path) -> dict[str, Any]:
    """Return the settings of a tokenizer that are stored beside its tokenizer.json."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = directory / name
        if file.is_file():
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise DataError(f"{file} is not JSON ({error})", "fetch or save the tokenizer again") from error
            settings |= {key: value for key, value in content.items() if value is not None}
    if (directory / "chat_template.jinja").is_file():
        settings["chat_template"] = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    return settings


def load_tokenizer(file: Path) -> Tokenizer:
    """Load a tokenizer.json, without the truncation and padding that it may ask for.

    Raises:
        DataError: if it is not a tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no narrower type
        raise DataError(f"{file} is not a tokenizer ({error})", "fetch or save it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def inspect_tokenizer(
    file: Path, tokenizer: Tokenizer, settings: dict[str, Any], *, setting: str = TOKENIZER_KEY
) -> TokenizerFiles:
    """Return a tokenizer on disk with its properties.

    Args:
        file: its tokenizer.json.
        settings: what the files beside declare.
        setting: how the user names it, for messages.

    Raises:
        DataError: if its special tokens are not in its vocabulary.
    """
    end_id = _token_id(file, tokenizer, settings, "eos_token")
    pad_id = _token_id(file, tokenizer, settings, "pad_token") if settings.get("pad_token") else end_id
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    identity = compute_identity(file.read_text(encoding="utf-8"), end_id, pad_id)
    return TokenizerFiles(file.parent, vocab_size, end_id, pad_id, identity, setting)


def _token_id(file: Path, tokenizer: Tokenizer, settings: dict[str, Any], role: str) -> int:
    declared = settings[role]
    token = declared["content"] if isinstance(declared, dict) else declared
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise DataError(
            f'the {role} "{token}" of the tokenizer {file.parent} is not in its vocabulary',
            "correct tokenizer_config.json or take the tokenizer.json that belongs to it",
        )
    return int(token_id)


def write_tokenizer(directory: Path, tokenizer: str, settings: dict[str, Any]) -> None:
    """Write a tokenizer in Hugging Face format into an existing directory."""
    (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
