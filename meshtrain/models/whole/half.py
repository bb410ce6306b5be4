"""Find the language half inside of a multimodal model.

It is found by its modules: the causal LM class of the text configuration, or the text model of that
class, is one of the modules of the whole model. No name of a type or of a module plays a role.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PretrainedConfig, PreTrainedModel

from meshtrain.compat.transformers import PATH_KEY, build
from meshtrain.errors import ModelError, name_some
from meshtrain.models.whole.causal_class import WHOLE_KEY, causal_class

# Values that differ between a half and the text configuration of its whole model by design.
_OWN = (WHOLE_KEY, PATH_KEY, "architectures", "dtype", "tie_word_embeddings", "transformers_version", "model_type")


@dataclass(frozen=True)
class LanguageHalf:
    """The language half of a multimodal model.

    Attributes:
        whole: the whole model on meta.
        where: name of the half among its modules.
        names: name in the state of the half -> name in the state of the whole model.
    """

    whole: PreTrainedModel
    where: str
    names: Mapping[str, str]

    def count_rest(self) -> dict[str, int]:
        """Return name -> number of parameters, of the largest modules that hold nothing trained."""
        trained = {*self.names.values()}
        kept = {name: p for name, p in self.whole.named_parameters() if name not in trained}
        found: dict[str, int] = {}
        for name, parameter in kept.items():
            place = _largest_without(name, trained)
            found[place] = found.get(place, 0) + parameter.numel()
        return found


def _largest_without(name: str, trained: set[str]) -> str:
    """Return the shortest prefix of a name that no trained name has."""
    words = name.split(".")
    for length in range(1, len(words)):
        prefix = ".".join(words[:length])
        if not any(other.startswith(f"{prefix}.") for other in trained):
            return prefix
    return name


def text_config_in(config: PretrainedConfig) -> PretrainedConfig | None:
    """Return the text configuration inside of that of a multimodal model; None if it is no other.

    Models that come with their own code are left as they are.
    """
    try:
        text = config.get_text_config()
    except ValueError:
        # It holds several text models.
        return None
    return None if text is config or whole_class(config) is None else text


def whole_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of a multimodal model in transformers.

    It is the one that the configuration names, or else that for images and text.
    """
    for name in config.architectures or ():
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
            return kind
    of_type: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    return of_type


def build_whole(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build a multimodal model on meta, in evaluation mode.

    Args:
        config: of a model that `text_config_in` finds a text configuration in.
    """
    kind = whole_class(config)
    assert kind is not None, "its class was found before"
    with torch.device("meta"):
        return build(kind, copy.deepcopy(config), dtype).eval()


def half_config(config: PretrainedConfig, whole: PreTrainedModel) -> PretrainedConfig:
    """Return the configuration of the language half of a model on meta.

    Args:
        config: of the whole model.

    Raises:
        ModelError: if transformers has no text model for it.
    """
    text = text_config_in(config)
    assert text is not None
    half = copy.deepcopy(text)
    setattr(half, WHOLE_KEY, {"architecture": type(whole).__name__})
    # The whole model decides; its text configuration may contradict it.
    half.tie_word_embeddings = _ties_embeddings(whole)
    half.dtype = text.dtype or config.dtype
    if causal_class(half) is None:
        raise ModelError(
            f"{type(whole).__name__} has a language half of type {text.model_type!r}, for which transformers has no "
            "model of its own",
            "use a model whose language half can be built alone",
        )
    return half


def _ties_embeddings(whole: PreTrainedModel) -> bool:
    first, last = whole.get_input_embeddings(), whole.get_output_embeddings()
    return last is not None and getattr(first, "weight", None) is last.weight


def set_half_values(config: PretrainedConfig, half: PretrainedConfig) -> bool:
    """Set the values of a half in the configuration of its whole model, and return if any differed.

    Args:
        config: of the whole model. It is changed.
        half: for example with a larger vocabulary.
    """
    text = text_config_in(config)
    assert text is not None
    there, here = _plain(text), _plain(half)
    changed = [name for name in here if name not in _OWN and here[name] != there.get(name)]
    for name in changed:
        setattr(text, name, getattr(half, name))
    return bool(changed)


def _plain(config: PretrainedConfig) -> dict[str, Any]:
    # One of the two may have been read from JSON, which has string keys and no tuples.
    values: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return values


def find_half(whole: PreTrainedModel, half: PreTrainedModel) -> LanguageHalf:
    """Find a causal LM inside of a whole model.

    Args:
        whole: on meta.
        half: on meta, of the text configuration.

    Raises:
        ModelError: if it is not there, or has other parameters there.
    """
    places = _places(whole, half)
    own, there = half.state_dict(), whole.state_dict()
    names = {name: _moved(name, places) for name in own}
    lost = [name for name, target in names.items() if target not in there or there[target].shape != own[name].shape]
    if lost:
        raise ModelError(
            f"{type(half).__name__} is not the language half of {type(whole).__name__}, which has no such weights: "
            f"{name_some(lost, 3)}",
            "use a folder that holds the language model alone",
        )
    where = next(iter(places.values()))
    return LanguageHalf(whole, where, {name: target for name, target in names.items() if target is not None})


def _places(whole: PreTrainedModel, half: PreTrainedModel) -> dict[str, str]:
    """Return name of a module of the half -> name in the whole model. The language model is first.

    Raises:
        ModelError: if there is none, or there are several.
    """
    if len(inside := _modules_of(whole, type(half))) == 1:
        return {"": inside[0]}
    base = half.base_model
    inside = _modules_of(whole, type(base))
    head, own_head = whole.get_output_embeddings(), half.get_output_embeddings()
    if len(inside) != 1 or head is None or own_head is None:
        raise ModelError(
            f"{type(whole).__name__} has {len(inside)} modules of class {type(base).__name__} and "
            f"{'no' if head is None else 'a'} head, so its language half cannot be found",
            "use a folder that holds the language model alone",
        )
    return {_name_of(half, base): inside[0], _name_of(half, own_head): _name_of(whole, head)}


def _modules_of(model: nn.Module, kind: type) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is kind]


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _moved(name: str, places: Mapping[str, str]) -> str | None:
    for own, there in places.items():
        if not own:
            return f"{there}.{name}"
        if name.startswith(f"{own}."):
            return f"{there}{name.removeprefix(own)}"
    return None
