"""Checks of arguments of the public functions that need torch or transformers.

The other checks are in `config.arguments`.
"""

import os
from pathlib import Path

import torch
from torch.optim import Optimizer
from upath import UPath

from meshtrain.checkpoint.huggingface.layout import FLOATS
from meshtrain.checkpoint.storage.location import open_location
from meshtrain.config.arguments import path_text, wrong
from meshtrain.errors import CheckpointError, ModelError, UserError
from meshtrain.runtime.agreement import raise_together
from meshtrain.runtime.location import Location


def resolve_dtype(asked: str, given: object, kind: type[UserError]) -> torch.dtype:
    """Return a torch dtype that is given as such or by its name.

    Raises:
        kind: for anything else.
    """
    if isinstance(given, torch.dtype):
        return given
    if isinstance(given, str) and given.removeprefix("torch.") in FLOATS:
        return FLOATS[given.removeprefix("torch.")]
    raise wrong(asked, given, f"torch.{', torch.'.join(FLOATS)}", kind)


def checkpoints_at(asked: str, given: object) -> Location:
    """Return the location of a directory for checkpoints. Collective.

    Raises:
        CheckpointError: if the argument is neither a path nor a URL; on all ranks alike, if it is a
            file on one of them.
    """
    text = str(given) if isinstance(given, UPath) else path_text(asked, given, CheckpointError, wanted="a path or URL")
    location = open_location(text)
    # `Path.is_file` would fail where a parent directory is not readable.
    is_file = isinstance(location, Path) and os.path.isfile(location)
    advice = "pass the directory of the checkpoints"
    raise_together([f"{asked} = {text!r} is a file; {advice}"] if is_file else [], CheckpointError)
    return location


def new_folder(asked: str, given: object) -> Path:
    """Return the path of a folder to write.

    Raises:
        CheckpointError: if the argument is not a path on this machine.
    """
    text = path_text(asked, given, CheckpointError)
    if "://" in text:
        raise CheckpointError(f"{asked} = {text!r} is a URL", "pass a folder of this machine, and upload it afterwards")
    return Path(text)


def check_tokenizer(asked: str, given: object) -> None:
    """Check that an argument is a tokenizer or a path of one, before anything is written.

    Raises:
        CheckpointError: if not.
    """
    is_tokenizer = hasattr(given, "save_pretrained") and not isinstance(given, type)
    if not (given is None or isinstance(given, str | Path) or is_tokenizer):
        raise wrong(asked, given, "a tokenizer, or a directory that holds one", CheckpointError)


def check_optimizer(asked: str, given: object, kind: type[UserError] = ModelError) -> None:
    """Check that an argument is an optimizer of torch.

    Raises:
        kind: if not.
    """
    if not isinstance(given, Optimizer):
        raise wrong(asked, given, "an optimizer, such as torch.optim.AdamW(model.parameters())", kind)
