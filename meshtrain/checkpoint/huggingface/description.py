"""What a Hugging Face folder holds beside the weights: config.json, generation_config.json and the tokenizer."""

import copy
import shutil
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from meshtrain.checkpoint.storage.directory import HUGGINGFACE_NAME
from meshtrain.data.tokens.tokenizer import TOKENIZER_FILE_NAMES
from meshtrain.errors import CheckpointError
from meshtrain.models.build import stock_class


class Saveable(Protocol):
    """What a tokenizer of transformers can do."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write itself into a directory."""


Tokenizer = Saveable | str | Path | None
"""A tokenizer, a directory that holds one, or None: what lies in the directory that the model came from, if anything"""


def write_description(
    directory: Path, model: PreTrainedModel, tokenizer: Tokenizer, dtype: torch.dtype, origin: Path | None = None
) -> None:
    """Write configuration, generation configuration and tokenizer of a model into a directory.

    Args:
        directory: exists.
        model: a stage of it.
        tokenizer: what to write.
        dtype: that config.json names.
        origin: where the model came from; None: what its configuration says.

    Raises:
        CheckpointError: if there is no tokenizer where one should be, or transformers refuses to write one of them.
    """
    config = copy.deepcopy(model.config)
    config.dtype = name_of(dtype)
    config.architectures = [stock_class(model).__name__]
    try:
        config.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)
    except ValueError as error:
        # The first line says that there is something, the second what.
        reason = [line.strip() for line in str(error).splitlines()[:2]]
        raise CheckpointError(
            f"transformers refuses to write the configuration of this model: {' '.join(reason)}"
        ) from error
    write_tokenizer(directory, tokenizer, origin or Path(str(config.name_or_path)))


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a number format, as a configuration has it."""
    return str(dtype).removeprefix("torch.")


def write_tokenizer(directory: Path, tokenizer: Tokenizer, origin: Path) -> None:
    """Write a tokenizer into a directory.

    Args:
        directory: exists.
        tokenizer: what to write; None: what lies in `origin`, if anything.
        origin: where the model came from.

    Raises:
        CheckpointError: if there is no tokenizer where one should be.
    """
    if tokenizer is None:
        # Path("") is the current directory.
        if origin != Path() and origin.is_dir():
            _copy_tokenizer(origin, directory)
    elif isinstance(tokenizer, str | Path):
        if not Path(tokenizer).is_dir() or not _copy_tokenizer(Path(tokenizer), directory):
            raise CheckpointError(
                f"tokenizer = {str(tokenizer)!r} is no directory with a tokenizer; give one, or the tokenizer itself"
            )
    else:
        tokenizer.save_pretrained(str(directory))


def _copy_tokenizer(source: Path, directory: Path) -> bool:
    """Copy the files of a tokenizer; return whether there are any."""
    if (source / HUGGINGFACE_NAME).is_dir():
        source /= HUGGINGFACE_NAME
    files = [source / name for name in TOKENIZER_FILE_NAMES if (source / name).is_file()]
    for file in files:
        shutil.copyfile(file, directory / file.name)
    return bool(files)
