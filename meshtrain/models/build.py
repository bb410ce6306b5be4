"""Build a Hugging Face causal LM on the meta device: its full structure, but no memory."""

import copy
import difflib
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import GENERATION_CONFIG_NAME, logging

from meshtrain.compat.autograd import OperatorMode
from meshtrain.compat.operators import ITEMS
from meshtrain.compat.transformers import attention_implementation, build, supports_sdpa
from meshtrain.config.problems import dotted, shortened
from meshtrain.config.run import ModelConfig
from meshtrain.errors import ModelError
from meshtrain.models.probe_inputs import PROBE_LENGTH, probe_ids
from meshtrain.models.refusals import FAILURES, REFUSALS, refusal_reason
from meshtrain.models.rotary import probed
from meshtrain.models.undeclared import changes_others, names_used
from meshtrain.models.values import value_problems
from meshtrain.models.whole.causal_class import causal_class, is_half
from meshtrain.models.whole.folder import with_language_half

MOST_MODULES = 500_000
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def load_hf_config(model: ModelConfig) -> PretrainedConfig:
    """Return the Hugging Face configuration that a run file describes.

    Raises:
        ModelError: for an unknown type, a directory without a model, or a value that the model does
            not have.
    """
    if model.type is not None:
        build = partial(_config_of_type, model.type)
        _check_values(build({}), model, lambda name: changes_others(build, name, model.config[name]))
        config = build(model.config)
    else:
        assert model.path is not None
        config = with_language_half(_config_at(model), model.path)
        _check_values(config, model, lambda name: False)
        if is_half(config) and "tie_word_embeddings" in model.config:
            raise ModelError(
                f"model.config.tie_word_embeddings: {model.path} is the folder of a multimodal model, which decides it",
                "leave it out",
            )
        _change(config, model.config)
    has_class = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or causal_class(config) is not None
    if not has_class and not model.trust_remote_code:
        raise ModelError(
            f"model type {config.model_type!r} has no causal language model in transformers", "use one that has"
        )
    return config


def build_meta_model(
    config: PretrainedConfig, *, dtype: torch.dtype, attention: str | None = "sdpa", trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build the stock model on the meta device, in training mode.

    Args:
        config: the Hugging Face configuration. It is not changed.
        dtype: of every parameter. It overrides the configuration, so that a bfloat16 model can be
            trained with float32 parameters.
        attention: an attention implementation of transformers. None: that of the configuration if
            it names one, else the default of transformers for this class.
        trust_remote_code: whether to run Python code that comes with the model.

    Raises:
        ModelError: if transformers refuses the configuration.
    """
    attention = attention or attention_implementation(config)
    # transformers writes number format and attention into the configuration that it is given.
    config = copy.deepcopy(config)
    # Some language halves have no class of their own until it is made.
    model_class = causal_class(config)
    _check_attention(config, attention, model_class)
    try:
        with torch.device("meta"), _few_modules(config.model_type):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
            )
    except (*REFUSALS, *FAILURES) as error:
        raise ModelError(
            f"transformers cannot build a {config.model_type} model from this configuration: {refusal_reason(error)}"
        ) from error
    except AttributeError as error:
        raise ModelError(f"transformers' own code fails to build a {config.model_type} model: {error}") from error
    if _sees_later_tokens(model):
        raise ModelError(
            f"model.config.is_decoder = false: a {config.model_type} then sees the tokens that it should predict",
            "set it to true",
        )
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            # XLNet makes its parameters by a constructor that knows no default device or format.
            if not parameter.is_meta:
                module.register_parameter(name, nn.Parameter(parameter.to("meta", dtype)))
    model.train()
    return model


@contextmanager
def _few_modules(model_type: str) -> Iterator[None]:
    """Stop the building of a model with too many modules, which would take hours.

    Some value of its configuration is then far too large.
    """
    numbers = itertools.count(1)

    def count(*_: object) -> None:
        if next(numbers) > MOST_MODULES:
            raise ModelError(
                f"model.config: a {model_type} model of this configuration has more than {MOST_MODULES:,} modules",
                "lower the number of its layers or experts",
            )

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def stock_class(model: nn.Module) -> Any:
    """Return the class of a model in transformers or in custom code.

    FSDP2 and meshtrain derive their own classes from it.
    """
    return next(kind for kind in type(model).__mro__ if not any(map(_is_mixed_in, kind.__mro__)))


def _is_mixed_in(kind: type) -> bool:
    return kind is FSDPModule or kind.__module__.startswith("meshtrain.")


def stock_like(model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return a full, unchanged model on meta for a model that was cut or sharded.

    Args:
        model: defines the class and the configuration.
        dtype: of the parameters; None: that of `model`.
    """
    return stock_model(stock_class(model), model.config, dtype or model.dtype)


def stock_model(kind: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model of any class of transformers on meta, without a change of the configuration."""
    with torch.device("meta"):
        return build(kind, copy.deepcopy(config), dtype)


def stored_generation_config(directory: Path) -> GenerationConfig | None:
    """Return the generation defaults of the model in a directory; None if it stores none."""
    inside = _description(directory)
    return GenerationConfig.from_pretrained(inside) if (inside / GENERATION_CONFIG_NAME).is_file() else None


def local_directory(path: str | Path, *, asked: str = "model.path") -> Path:
    """Return the directory with the files of a model. For a hub id it is in the hub's cache.

    Args:
        path: of the directory, or the hub id.
        asked: the name of the setting or argument that the user set, for messages.

    Raises:
        ModelError: if the directory does not exist and `path` is not a hub id, or is a hub id that
            is not in the cache and cannot be downloaded.
    """
    found, what = Path(path), f"{asked} = {str(path)!r}"
    if str(path) and found.is_dir():
        return _description(found)
    if found.is_file():
        raise ModelError(f"{what} is a file", f"use its directory, {str(found.parent)!r}")
    if not _HUB_ID.fullmatch(str(path)):
        raise ModelError(f"{what}: there is no such directory, and a hub id looks like 'owner/name'")
    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.safetensors", "*.json"]))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{what}: no such directory, and it cannot be downloaded from the hub: {refusal_reason(error)}"
        ) from error


def _description(directory: Path) -> Path:
    """Return the directory with the configuration of a local model.

    In a checkpoint of meshtrain that is an inner directory.
    """
    inside = directory / "huggingface"
    return inside if (inside / "config.json").is_file() else directory


def _config_of_type(model_type: str, values: dict) -> PretrainedConfig:
    if model_type not in CONFIG_MAPPING_NAMES:
        near = difflib.get_close_matches(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; see the model types of transformers"
        raise ModelError(f"model.type = {shortened(repr(model_type))}: transformers has no such model type{hint}")
    verbosity = logging.get_verbosity()
    # transformers warns that the default end token of the type is outside of a smaller vocabulary.
    logging.set_verbosity_error()
    try:
        return AutoConfig.for_model(model_type, **values)
    except (AttributeError, *REFUSALS, *FAILURES) as error:
        raise _refusal(model_type, error) from error
    finally:
        logging.set_verbosity(verbosity)


def _config_at(model: ModelConfig) -> PretrainedConfig:
    assert model.path is not None
    path = _description(Path(model.path)) if Path(model.path).is_dir() else model.path
    if isinstance(path, Path) and not (path / "config.json").is_file():
        raise ModelError(
            f"model.path = {model.path!r}: the directory holds no config.json",
            "use a Hugging Face model, or a checkpoint (a step-N directory)",
        )
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except (OSError, *REFUSALS) as error:
        raise ModelError(
            f"model.path = {model.path!r}: it holds no Hugging Face model: {refusal_reason(error)}"
        ) from error


def _change(config: PretrainedConfig, values: dict) -> None:
    try:
        for name, value in values.items():
            setattr(config, name, value)
    except (AttributeError, *REFUSALS, *FAILURES) as error:
        raise _refusal(config.model_type, error) from error


def _refusal(model_type: str, error: Exception) -> ModelError:
    return ModelError(f"model.config: transformers refuses it for {model_type!r}: {refusal_reason(error)}")


def _sees_later_tokens(model: PreTrainedModel) -> bool:
    """Return whether a model sees the tokens to predict, because it is not set to be a decoder.

    The check compares its operators with those of the same model as a decoder.
    """
    if getattr(model.config, "is_decoder", True):
        return False
    # Some decoders have the value too, but never use it.
    config = copy.deepcopy(model.config)
    config.is_decoder = True
    with torch.device("meta"):
        decoder = build(type(model), config, model.dtype)
    try:
        return _operators_of(model) != _operators_of(decoder)
    except (*REFUSALS, RuntimeError, IndexError, AttributeError):
        # The comparison failed, so the result is unknown. is_decoder = true does no harm.
        return True


def _operators_of(model: PreTrainedModel) -> list[tuple[object, ...]]:
    """Return the operators that a forward pass on meta runs, each with its numbers as arguments."""
    ids = probe_ids(torch.device("meta"))
    with _Operators() as operators, torch.no_grad(), probed(model.eval(), PROBE_LENGTH):
        model(input_ids=ids, use_cache=False)
    return operators.found


class _Operators(OperatorMode):
    """Records the operators that run, with their arguments that are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[object, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ITEMS and args[0].is_meta:
            # A meta tensor has no value, and both passes must continue in the same way.
            return 1
        # Lists are left out, because they may hold tensors.
        numbers = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, (bool, int, float))]
        self.found.append((func, *numbers))
        return func(*args, **(kwargs or {}))


def _check_attention(
    config: PretrainedConfig, attention: str | None, model_class: type[PreTrainedModel] | None
) -> None:
    # A class from custom code is not in the mapping. transformers checks it.
    if attention == "sdpa" and not supports_sdpa(model_class):
        raise ModelError(
            f"attention = 'sdpa': transformers does not support it for {config.model_type!r}",
            "use 'eager' (model.attention in a run file)",
        )


def _check_values(config: PretrainedConfig, model: ModelConfig, changes: Callable[[str], bool]) -> None:
    _check_names(config, model, changes)
    if problems := list(value_problems(config, model.config)):
        raise ModelError(problems)


def _check_names(config: PretrainedConfig, model: ModelConfig, changes: Callable[[str], bool]) -> None:
    """Check that the configuration declares every name, or that transformers uses it undeclared.

    transformers stores every keyword as an attribute, so a misspelled name would train another
    model without an error.

    Args:
        config: declares names.
        model: from the run file, with the names to check.
        changes: returns whether an undeclared name changes declared values.
    """
    declared = {*config.to_dict(), *config.attribute_map}
    unknown = [name for name in model.config if name not in declared]
    used = names_used(config) if unknown else set()
    problems = []
    for name in unknown:
        if name not in used and not changes(name):
            near = difflib.get_close_matches(name, declared, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            problems.append(f"{dotted(('model', 'config', name))}: {config.model_type} has no such value{hint}")
    if problems:
        raise ModelError(problems)
