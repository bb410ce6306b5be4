"""The files of a Hugging Face folder beside the weights.

These are config.json, generation_config.json and the files of the tokenizer.
"""

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
from meshtrain.models.dtypes import dtype_name


class Saveable(Protocol):
    """The part of the interface of transformers' tokenizers that is needed here."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write the tokenizer into a directory."""


Tokenizer = Saveable | str | Path | None
"""A tokenizer, or a directory that holds one.

None: the one in the directory that the model came from, if there is one.
"""


def write_description(
    directory: Path, model: PreTrainedModel, tokenizer: Tokenizer, dtype: torch.dtype, origin: Path | None = None
) -> None:
    """Write configuration, generation configuration and tokenizer of a model into a directory.

    Args:
        directory: exists.
        model: a stage of the model.
        tokenizer: to write.
        dtype: the number format that config.json names.
        origin: directory that the model came from. None: the one that its configuration names.

    Raises:
        CheckpointError: if a tokenizer was requested and does not exist, or transformers refuses to
            write the configuration.
    """
    config = copy.deepcopy(model.config)
    config.dtype = dtype_name(dtype)
    config.architectures = [stock_class(model).__name__]
    try:
        config.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)
    except ValueError as error:
        # The first line reports that there is an error, the second one describes it.
        reason = [line.strip() for line in str(error).splitlines()[:2]]
        raise CheckpointError(
            f"transformers refuses to write the configuration of this model: {' '.join(reason)}"
        ) from error
    save_tokenizer(directory, tokenizer, origin or Path(str(config.name_or_path)))


def save_tokenizer(directory: Path, tokenizer: Tokenizer, origin: Path) -> None:
    """Write a tokenizer into a directory.

    Args:
        directory: exists.
        tokenizer: to write. None: the one in `origin`, if there is one.
        origin: directory that the model came from.

    Raises:
        CheckpointError: if `tokenizer` is a path without a tokenizer.
    """
    if tokenizer is None:
        # An empty name in the configuration becomes Path(""), which is the current directory.
        if origin != Path() and origin.is_dir():
            _copy_tokenizer(origin, directory)
    elif isinstance(tokenizer, str | Path):
        if not Path(tokenizer).is_dir() or not _copy_tokenizer(Path(tokenizer), directory):
            raise CheckpointError(
                f"tokenizer = {str(tokenizer)!r} is not a directory with a tokenizer",
                "pass one, or the tokenizer itself",
            )
    else:
        tokenizer.save_pretrained(str(directory))


def _copy_tokenizer(source: Path, directory: Path) -> bool:
    """Copy the files of a tokenizer, and return whether there were any."""
    if (source / HUGGINGFACE_NAME).is_dir():
        source /= HUGGINGFACE_NAME
    files = [source / name for name in TOKENIZER_FILE_NAMES if (source / name).is_file()]
    for file in files:
        shutil.copyfile(file, directory / file.name)
    return bool(files)
