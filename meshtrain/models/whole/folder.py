"""The folder of a multimodal model: its language half, and what a run records about it."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import xxhash
from huggingface_hub import snapshot_download
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel

from meshtrain.compat.transformers import build, commit_of
from meshtrain.errors import ModelError, reason_of
from meshtrain.models.refusals import FAILURES, REFUSALS, refusal_reason
from meshtrain.models.weights.safetensors_files import find_tensors
from meshtrain.models.whole.causal_class import WHOLE_KEY, causal_class, is_half
from meshtrain.models.whole.half import (
    LanguageHalf,
    build_whole,
    find_half,
    half_config,
    set_half_values,
    text_config_in,
)
from meshtrain.models.whole.proof import check_half

CONFIG_NAME = "config.json"


def with_language_half(config: PretrainedConfig, path: str) -> PretrainedConfig:
    """Return the configuration of the language half of a multimodal model, or `config` itself.

    The half records where its whole model is, so that an export can write it back.

    Args:
        config: as it was read from `path`.
        path: a local directory, or a hub id.

    Raises:
        ModelError: if the half cannot be built alone, or computes something else alone.
    """
    if text_config_in(config) is None:
        return config
    try:
        whole = build_whole(config)
    except (AttributeError, ImportError, *REFUSALS, *FAILURES) as error:
        raise ModelError(
            f"transformers cannot build a {config.model_type} model from this configuration: {refusal_reason(error)}"
        ) from error
    half = half_config(config, whole)
    check_half(config)
    directory, is_here = Path(path), Path(path).is_dir()
    record = {
        "architecture": type(whole).__name__,
        "path": str(directory.resolve()) if is_here else path,
        "files": files_identity(directory) if is_here else commit_of(config),
    }
    setattr(half, WHOLE_KEY, record)
    return half


def files_identity(directory: Path) -> str:
    """Return a hash of the configuration and of the headers of the weights in a folder.

    Empty for a folder without weights: a run may start from random ones, but not be written back.
    """
    try:
        tensors = find_tensors(directory)
    except ModelError:
        return ""
    headers = sorted((name, str(one.dtype), one.shape, one.path.name, one.start) for name, one in tensors.items())
    return xxhash.xxh3_64_hexdigest((directory / CONFIG_NAME).read_bytes() + json.dumps(headers).encode())


def whole_folder(config: PretrainedConfig) -> Path:
    """Return the folder that a language half came from, with the files that it had then.

    Args:
        config: of the half.

    Raises:
        ModelError: if the folder is gone, or has changed.
    """
    record: dict[str, Any] = getattr(config, WHOLE_KEY)
    path, architecture = record["path"], record["architecture"]
    what = f"{path}, the folder of the {architecture} whose language half was trained,"
    if is_local(config):
        if not Path(path).is_dir():
            raise ModelError(f"{what} is gone", "put it back there, or a link to it: the rest of the model is in it")
        if files_identity(Path(path)) != record["files"]:
            raise ModelError(f"{what} has changed since the run began", "put the files back that it had")
        return Path(path)
    try:
        return Path(snapshot_download(path, revision=record["files"], ignore_patterns=["*.bin", "*.pth", "*.gguf"]))
    except (OSError, ValueError) as error:
        raise ModelError(f"{what} cannot be downloaded from the hub again: {reason_of(error)}") from error


def whole_config_at(directory: Path) -> PretrainedConfig | None:
    """Return the configuration of the multimodal model in a folder; None for any other content."""
    config = _stock_config_at(directory)
    return None if config is None or text_config_in(config) is None else config


def half_config_at(directory: Path) -> PretrainedConfig | None:
    """Return the configuration in a folder if it is of a language half; None for any other."""
    config = _stock_config_at(directory)
    return config if config is not None and is_half(config) else None


def _stock_config_at(directory: Path) -> PretrainedConfig | None:
    """Return the configuration in a folder; None if transformers has no class for it."""
    path = directory / CONFIG_NAME
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())
        if values.get("model_type") not in CONFIG_MAPPING:
            return None
        config: PretrainedConfig = CONFIG_MAPPING[values["model_type"]].from_pretrained(directory)
    except (OSError, AttributeError, *REFUSALS):
        # What reads the folder as that of an ordinary model reports it.
        return None
    return config


def half_in_folder(directory: Path, stock: PreTrainedModel) -> LanguageHalf | None:
    """Find a causal LM inside of the multimodal model of a folder.

    Args:
        stock: the full causal LM on meta. Its configuration may have other values than the folder,
            such as a larger vocabulary.

    Returns:
        None if the folder holds no multimodal model with a text model of this type.

    Raises:
        ModelError: if the causal LM is not the language half of that model.
    """
    config = whole_config_at(directory)
    if config is None or type(text_config_in(config)) is not type(stock.config):
        return None
    set_half_values(config, stock.config)
    return find_half(build_whole(config, stock.dtype), stock)


def half_of(config: PretrainedConfig) -> tuple[LanguageHalf, Path] | None:
    """Find the language half that a run trains in the folder that it came from.

    A folder of the hub is downloaded if it is not in the cache.

    Args:
        config: of the causal LM of a run.

    Returns:
        The half and the folder; None for a model that is no half.

    Raises:
        ModelError: if the folder is gone, or has changed.
    """
    if not is_half(config):
        return None
    folder = whole_folder(config)
    half = half_in_folder(folder, _stock_half(config))
    assert half is not None, "the folder has not changed"
    return half, folder


def described_half(config: PretrainedConfig) -> LanguageHalf | None:
    """Find the language half that a run trains, by configurations alone. Nothing is downloaded.

    Args:
        config: of the causal LM of a run.

    Returns:
        None for a model that is no half.

    Raises:
        ModelError: if the folder is gone, or has changed.
    """
    if not is_half(config):
        return None
    record = getattr(config, WHOLE_KEY)
    if is_local(config):
        found = half_of(config)
        assert found is not None
        return found[0]
    whole_config = AutoConfig.from_pretrained(record["path"], revision=record["files"])
    set_half_values(whole_config, config)
    return find_half(build_whole(whole_config), _stock_half(config))


def is_local(config: PretrainedConfig) -> bool:
    """Return whether the folder that a language half came from is a directory, not on the hub."""
    return Path(getattr(config, WHOLE_KEY)["path"]).is_absolute()


def _stock_half(config: PretrainedConfig) -> PreTrainedModel:
    kind = causal_class(config)
    assert kind is not None, "its class was found before"
    with torch.device("meta"):
        return build(kind, copy.deepcopy(config), torch.float32)
