"""transformers: what a model, its class and its configuration say under private names, or have only there."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import OutputRecorder

PATH_KEY = "_name_or_path"
"""Key of a configuration's `to_dict` for where it was loaded from.

Why: it says nothing of the model, and is left out where two configurations are compared.
Holds: transformers 5.17 to 5.23.
"""

_REGISTERED: Counter[str] = Counter()


def attention_implementation(config: PretrainedConfig) -> str | None:
    """Return which attention a model of this configuration uses; None if the configuration does not say.

    Why: `attn_implementation` can be given to a configuration in public, and not be read.
    Holds: transformers 5.17 to 5.23.
    """
    return config._attn_implementation


def set_attention_implementation(config: PretrainedConfig, name: str) -> None:
    """Let a model that is built from a configuration use an attention implementation of transformers.

    Why: the public way needs a model, or an Auto class.
    Holds: transformers 5.17 to 5.23.
    """
    config._attn_implementation = name


def loops_over_experts(config: PretrainedConfig) -> bool:
    """Tell whether experts run the loop of their own class, and no fused operator of transformers.

    Why: as for `attention_implementation`.
    Holds: transformers 5.17 to 5.23.
    """
    return config._experts_implementation == "eager"


def loop_over_experts(config: PretrainedConfig) -> None:
    """Let a model that is built from a configuration run the loops of its expert classes.

    Why: the fused operators know no float64. The public way needs a model, and this is before one.
    Holds: transformers 5.17 to 5.23.
    """
    config._experts_implementation = "eager"


def build(kind: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model of any class in a number format; its configuration becomes that of the model.

    Why: `from_config` is there for the Auto classes only, and its constructor takes no number format.
    Holds: transformers 5.17 to 5.23.
    """
    return kind._from_config(config, dtype=dtype)


def supports_sdpa(kind: type[PreTrainedModel] | None) -> bool:
    """Tell whether a class can run on torch's scaled dot product attention; True for one that is not known.

    Why: transformers says so by a private attribute of the class, and raises late.
    Holds: transformers 5.17 to 5.23.
    """
    return getattr(kind, "_supports_sdpa", True)


def supports_attention_interface(model: PreTrainedModel) -> bool:
    """Tell whether the attention of a model goes through the interface of transformers, where it can be replaced.

    Why: transformers says so by a private attribute of the class.
    Holds: transformers 5.17 to 5.23.
    """
    return bool(model._supports_attention_backend)


def tensor_plan(model: PreTrainedModel) -> Mapping[str, str]:
    """Return transformers' own plan for tensor parallelism: pattern of module names -> word.

    Why: the configuration has that of the base model in public; what the head and the class add is private.
    Holds: transformers 5.17 to 5.23.
    """
    return model._tp_plan or {}


def declarable_ties(model: PreTrainedModel) -> Mapping[str, str]:
    """Return name -> name of the weights that a class ties if its configuration says so.

    Why: `all_tied_weights_keys` has only those that the configuration does tie.
    Holds: transformers 5.17 to 5.23.
    """
    return cast(Mapping[str, str], model._tied_weights_keys or {})


def never_saved(model: PreTrainedModel) -> Sequence[str]:
    """Return the names in `state_dict` that `save_pretrained` leaves out, besides those of tied weights.

    Why: transformers says so by a private attribute of the class.
    Holds: transformers 5.17 to 5.23.
    """
    return [*(model._keys_to_ignore_on_save or ())]


def ignored_when_loaded(model: PreTrainedModel) -> Sequence[str]:
    """Return patterns of names that may be in the files of a model, and are not loaded.

    Why: transformers says so by a private attribute of the class.
    Holds: transformers 5.17 to 5.23.
    """
    return [*(model._keys_to_ignore_on_load_unexpected or ())]


def kept_dtypes(model: PreTrainedModel) -> Mapping[str, torch.dtype]:
    """Return pattern of names -> number format of what `from_pretrained` keeps in another one than the model's.

    Why: transformers applies it while it loads, and shows it to nobody.
    Holds: transformers 5.17 to 5.23.
    """
    return model._get_dtype_plan(model.dtype)


def set_weight_conversions(model: PreTrainedModel, conversions: Sequence[Any]) -> None:
    """Note on a model how the names and shapes of its files become its own, as if it had been loaded.

    Why: `revert_weight_conversion` reads it there; for a model that was not loaded it would find them at every call.
    Holds: transformers 5.17 to 5.23.
    """
    vars(model)["_weight_conversions"] = conversions


def keeps_keys_and_values(model: Any) -> bool:
    """Tell whether `generate` gives a model a cache of keys and values.

    Why: transformers decides it by the name of the class, in a private method.
    Holds: transformers 5.17 to 5.23.
    """
    return model._supports_default_dynamic_cache()


def is_made_of_configuration(generation: GenerationConfig) -> bool:
    """Tell whether transformers has made a generation configuration of a model's, and nobody has written it.

    Why: transformers keeps it under a private name.
    Holds: transformers 5.17 to 5.23.
    """
    return bool(getattr(generation, "_from_model_config", False))


def has_loss_of_program(model: PreTrainedModel) -> bool:
    """Tell whether a program has set `model.loss_function`.

    Why: the public property gives the loss of transformers as well.
    Holds: transformers 5.17 to 5.23.
    """
    return "_loss_function" in vars(model)


def router_recorder(model: PreTrainedModel) -> OutputRecorder | None:
    """Return how transformers finds the router logits of a model class; None if it does not, or in several ways.

    Why: only the class says which of its modules are routers, by a private attribute.
    Holds: transformers 5.17 to 5.23.
    """
    recorder = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    return recorder if isinstance(recorder, OutputRecorder) else None


def checkpoint_of(layer: Any) -> Callable[..., Any]:
    """Return the function that a layer calls to compute with recomputation.

    Why: `gradient_checkpointing_enable` sets it for all layers of a model, and a plan chooses it for each.
    Holds: transformers 5.17 to 5.23.
    """
    return layer._gradient_checkpointing_func


def set_checkpoint(layer: Any, function: Callable[..., Any]) -> None:
    """Set the function that a layer calls to compute with recomputation.

    Why: as for `checkpoint_of`.
    Holds: transformers 5.17 to 5.23.
    """
    layer._gradient_checkpointing_func = function


def can_leave_out_experts(module: nn.Module) -> bool:
    """Tell whether a module of experts knows that some of them are on other processes.

    Why: transformers marks such modules by a private attribute.
    Holds: transformers 5.17 to 5.23.
    """
    return hasattr(module, "_is_expert_parallel")


def leave_out_experts(module: Any) -> None:
    """Let a module of experts leave out what is routed to an expert behind the last one.

    Why: the fused operators of transformers do so only for modules with this mark.
    Holds: transformers 5.17 to 5.23.
    """
    module._is_expert_parallel = True


def named_function(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """Return a function of the file that the class of a module is defined in; None if there is none of this name.

    Why: each modelling file has its own `eager_attention_forward` and `load_balancing_loss_func`, which no registry
    has.
    Holds: transformers 5.17 to 5.23.
    """
    return vars(sys.modules[type(module).__module__]).get(name)


def set_attention(model: PreTrainedModel, name: str, function: Callable[..., Any], *, masks_of: str) -> None:
    """Let one model use an attention function of ours, for as long as it lives.

    Why: models look attention up by name in tables of the process, and `register` has no way back. The name is taken
    out of them when the last model that uses it is gone. Without its masks a model would see the tokens to come:
    transformers makes none for a name that is not in the private table.
    Holds: transformers 5.17 to 5.23.

    Args:
        name: the same for the same function only.
        function: as for `AttentionInterface.register`.
        masks_of: the attention implementation whose masks it takes.
    """
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[masks_of])
    _REGISTERED[name] += 1
    weakref.finalize(model, _forget_attention, name).atexit = False
    model.set_attn_implementation(name)


def _forget_attention(name: str) -> None:
    _REGISTERED[name] -= 1
    if not _REGISTERED[name]:
        del AttentionInterface._global_mapping[name], AttentionMaskInterface._global_mapping[name]
