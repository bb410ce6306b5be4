"""transformers: private attributes of models, model classes and configurations."""

import copy
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import OutputRecorder

_OWN_NAME = "meshtrain_"
PATH_KEY = "_name_or_path"
"""Key in a configuration's `to_dict` for the path that it was loaded from.

Why: the path does not describe the model, and is left out where two configurations are compared.
Holds: transformers 5.17 to 5.23.
"""


def attention_implementation(config: PretrainedConfig) -> str | None:
    """Return the attention implementation of a configuration; None if it sets none.

    Why: `attn_implementation` of a configuration can be set in public, but not read.
    Holds: transformers 5.17 to 5.23.
    """
    return config._attn_implementation


def set_attention_implementation(config: PretrainedConfig, name: str) -> None:
    """Set the attention implementation for models that are built from a configuration.

    Why: the public way needs a model, or an Auto class.
    Holds: transformers 5.17 to 5.23.
    """
    config._attn_implementation = name


def loops_over_experts(config: PretrainedConfig) -> bool:
    """Return whether experts run the loop of their own class instead of a fused operator.

    Why: as for `attention_implementation`.
    Holds: transformers 5.17 to 5.23.
    """
    return config._experts_implementation == "eager"


def loop_over_experts(config: PretrainedConfig) -> None:
    """Make models that are built from a configuration run the loops of their expert classes.

    Why: the fused operators do not support float64. The public way needs a model, and none is built
    yet.
    Holds: transformers 5.17 to 5.23.
    """
    config._experts_implementation = "eager"


def copy_expert_implementation(source: PretrainedConfig, target: PretrainedConfig) -> None:
    """Give a configuration the expert implementation of another one.

    Why: `to_dict` and `from_dict` leave it out.
    Holds: transformers 5.17 to 5.23.
    """
    target._experts_implementation = source._experts_implementation


def commit_of(config: PretrainedConfig) -> str | None:
    """Return the commit of the hub that a configuration was downloaded from; None for a local one.

    Why: a run records which files it read, and `to_dict` leaves the commit out.
    Holds: transformers 5.17 to 5.23.
    """
    return getattr(config, "_commit_hash", None)


def note_reads(config: PretrainedConfig, note: Callable[[str], object]) -> PretrainedConfig:
    """Return a copy of a configuration that calls `note` with each name that is read.

    Why: a class may use values that no configuration class declares, and only reading shows which.
    `__getattribute__` is looked up on the class, so the copy has a class of its own.
    Holds: transformers 5.17 to 5.23.
    """
    stock = type(config)

    def read(self: PretrainedConfig, name: str) -> Any:
        note(name)
        return stock.__getattribute__(self, name)

    noting = copy.deepcopy(config)
    noting.__class__ = type(stock.__name__, (stock,), {"__getattribute__": read})
    return noting


def build(kind: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Build a model of any class; its configuration becomes that of the model.

    Why: only the Auto classes have `from_config`, and the constructor of a class takes no number
    format.
    Holds: transformers 5.17 to 5.23.
    """
    return kind._from_config(config, **({} if dtype is None else {"dtype": dtype}))


def supports_sdpa(kind: type[PreTrainedModel] | None) -> bool:
    """Return whether a class supports torch's scaled dot product attention; True for None.

    Why: transformers has this in a private attribute of the class, and raises late.
    Holds: transformers 5.17 to 5.23.
    """
    return getattr(kind, "_supports_sdpa", True)


def tensor_plan(model: PreTrainedModel) -> Mapping[str, str]:
    """Return transformers' own plan for tensor parallelism: pattern of module names -> style.

    Why: the configuration has the plan of the base model in public; what the head and the class add
    is private.
    Holds: transformers 5.17 to 5.23.
    """
    return model._tp_plan or {}


def declarable_ties(model: PreTrainedModel) -> Mapping[str, str]:
    """Return name -> name of the weights that a class ties if its configuration enables it.

    Why: `all_tied_weights_keys` has only those that the configuration does tie.
    Holds: transformers 5.17 to 5.23.
    """
    return cast(Mapping[str, str], model._tied_weights_keys or {})


def never_saved(model: PreTrainedModel) -> Sequence[str]:
    """Return the names in `state_dict` that `save_pretrained` leaves out, except tied weights.

    Why: transformers has this in a private attribute of the class.
    Holds: transformers 5.17 to 5.23.
    """
    return [*(model._keys_to_ignore_on_save or ())]


def ignored_when_loaded(model: PreTrainedModel) -> Sequence[str]:
    """Return patterns of names that may be in the files of a model but are not loaded.

    Why: transformers has this in a private attribute of the class.
    Holds: transformers 5.17 to 5.23.
    """
    return [*(model._keys_to_ignore_on_load_unexpected or ())]


def kept_dtypes(model: PreTrainedModel) -> Mapping[str, torch.dtype]:
    """Return pattern of names -> dtype, where `from_pretrained` keeps another than the model's.

    Why: transformers applies this while it loads, and has no public access to it.
    Holds: transformers 5.17 to 5.23.
    """
    return model._get_dtype_plan(model.dtype)


def set_weight_conversions(model: PreTrainedModel, conversions: Sequence[Any]) -> None:
    """Record on a model how the names and shapes in its files become its own, as loading does.

    Why: `revert_weight_conversion` reads the record; without one it would search for the
    conversions at every call.
    Holds: transformers 5.17 to 5.23.
    """
    vars(model)["_weight_conversions"] = conversions


def keeps_keys_and_values(model: Any) -> bool:
    """Return whether `generate` uses a cache of keys and values for a model.

    Why: transformers decides this by the name of the class, in a private method.
    Holds: transformers 5.17 to 5.23.
    """
    return model._supports_default_dynamic_cache()


def is_made_of_configuration(generation: GenerationConfig) -> bool:
    """Return whether transformers derived a generation configuration from that of the model.

    Why: transformers keeps this under a private name.
    Holds: transformers 5.17 to 5.23.
    """
    return bool(getattr(generation, "_from_model_config", False))


def has_loss_of_program(model: PreTrainedModel) -> bool:
    """Return whether a program has set `model.loss_function`.

    Why: the public property returns the loss of transformers as well.
    Holds: transformers 5.17 to 5.23.
    """
    return "_loss_function" in vars(model)


def forget_loss(model: PreTrainedModel) -> None:
    """Undo the setting of `model.loss_function`.

    Why: the public property cannot be deleted.
    Holds: transformers 5.17 to 5.23.
    """
    del model._loss_function


@contextmanager
def loss_replaced(model: Any, loss: Callable[..., Tensor]) -> Iterator[None]:
    """Let a model call another loss than that of transformers while the block runs.

    Why: as for `forget_loss`.
    Holds: transformers 5.17 to 5.23.

    Args:
        model: whose loss no program has set.
        loss: called with transformers' loss and the arguments of that.
    """
    model.loss_function = partial(loss, model.loss_function)
    try:
        yield
    finally:
        forget_loss(model)


def router_recorder(model: PreTrainedModel) -> OutputRecorder | None:
    """Return how transformers records the router logits of a model class.

    None if it does not, or does so in several ways.

    Why: only a private attribute of the class shows which modules are routers.
    Holds: transformers 5.17 to 5.23.
    """
    recorder = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    return recorder if isinstance(recorder, OutputRecorder) else None


def selection_bias(block: nn.Module) -> tuple[nn.Module, str] | None:
    """Return where the bias is with which a block selects experts, beside its scores, or None.

    Its module and name are returned. It is a buffer, or a frozen parameter.

    Why: only its name shows that it has no part in the weights of the chosen experts.
    Holds: transformers 5.17 to 5.23.
    """
    for module in block.modules():
        for name in ("e_score_correction_bias", "expert_bias"):
            if isinstance(getattr(module, name, None), Tensor):
                return module, name
    return None


def checkpoint_of(layer: Any) -> Callable[..., Any]:
    """Return the function that a layer calls to compute with recomputation.

    Why: `gradient_checkpointing_enable` sets it for all layers of a model, but a plan sets it for
    each layer.
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
    """Return whether a module of experts supports experts on other processes.

    Why: transformers marks such modules by a private attribute.
    Holds: transformers 5.17 to 5.23.
    """
    return hasattr(module, "_is_expert_parallel")


def leave_out_experts(module: Any) -> None:
    """Make a module of experts skip tokens that are routed to an expert beyond the last one.

    Why: the fused operators of transformers do so only for modules with this mark.
    Holds: transformers 5.17 to 5.23.
    """
    module._is_expert_parallel = True


def named_function(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """Return a function by name from the file of a module's class, or of a base class, or None.

    Why: each modeling file has its own `eager_attention_forward` and `load_balancing_loss_func`,
    which are in no registry.
    Holds: transformers 5.17 to 5.23.
    """
    for kind in type(module).__mro__:
        if (found := vars(sys.modules[kind.__module__]).get(name)) is not None:
            return found
    return None


_numbers = itertools.count()


def attention_registered(owner: Any) -> str:
    """Make `owner.attend` and `owner.mask` an attention of transformers, and return its name.

    Why: an attention is found by name, in a table that can be added to in public, but not removed
    from. The entries must not keep a model in memory.
    Holds: transformers 5.17 to 5.23.
    """
    name, reference = f"{_OWN_NAME}{next(_numbers)}", cast(Callable[[], Any], weakref.ref(owner))
    AttentionInterface.register(name, lambda *args, **kwargs: reference().attend(*args, **kwargs))
    AttentionMaskInterface.register(name, lambda *args, **kwargs: reference().mask(*args, **kwargs))
    for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        weakref.finalize(owner, table._global_mapping.pop, name, None)
    return name


def is_registered_here(name: str) -> bool:
    """Return whether an attention is one of `attention_registered`.

    Why: a configuration that a parallel model has shared names it, and transformers does not tell
    whose it is.
    Holds: transformers 5.17 to 5.23.
    """
    return name.startswith(_OWN_NAME)


def takes_masks(name: str) -> bool:
    """Return whether an attention takes a mask of any form, as those of flash attention do not.

    Why: transformers makes another thing than a mask for these, by a function in a private module.
    Holds: transformers 5.17 to 5.23.
    """
    return ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.get(name, flash_attention_mask) is not flash_attention_mask


def attention_function(name: str, module: nn.Module) -> Callable[..., Any]:
    """Return the function that computes attention under a name for a module.

    Why: that of "eager" belongs to the file of the module's class, and is in no table.
    Holds: transformers 5.17 to 5.23.
    """
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, cast(Any, named_function(module, "eager_attention_forward")))


def mask_function_of(name: str) -> Callable[..., Any]:
    """Return the function that makes masks for an attention.

    Why: the table of these functions is exported from a private module only.
    Holds: transformers 5.17 to 5.23.
    """
    return ALL_MASK_ATTENTION_FUNCTIONS[name]
