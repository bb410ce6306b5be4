"""What a module must be for a style: conditions of the rows of the table of styles.

A condition yields why a module cannot have a style, and what to do. Each reason continues a
sentence that begins with the name of the module and its style.
"""

from collections.abc import Callable, Iterator

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from meshtrain.compat.transformers import can_leave_out_experts
from meshtrain.parallel.tensor.head_share import heads_of
from meshtrain.parallel.tensor.probes import looks_up_rows, projects_as_linear

Refusals = Iterator[tuple[str, str]]
"""Reasons, each with an advice."""
Requirement = Callable[[PreTrainedModel, str], Refusals]
REPLICATE = "make it 'replicate'"


def require_nothing(model: PreTrainedModel, name: str) -> Refusals:
    """Accept any module."""
    yield from ()


def require_projection(model: PreTrainedModel, name: str) -> Refusals:
    """Accept what computes as Linear or Conv1D does."""
    module = model.get_submodule(name)
    if not is_projection(module):
        yield f", which is for Linear and Conv1D, not for a {type(module).__name__}", REPLICATE


def require_lookup(model: PreTrainedModel, name: str) -> Refusals:
    """Accept what looks up rows as Embedding does, and has no option that needs the full table."""
    module = model.get_submodule(name)
    if not is_lookup(module):
        yield f", which is for an Embedding, not for a {type(module).__name__}", REPLICATE
    if getattr(module, "max_norm", None) is not None or getattr(module, "scale_grad_by_freq", False):
        yield ", but its max_norm or scale_grad_by_freq needs the full table", REPLICATE


def require_rotary_key(model: PreTrainedModel, name: str) -> Refusals:
    """Accept a projection of a model with latent attention."""
    if mla_rope_width(getattr(model, "config", None)) is None:
        yield ", but the model's configuration has no qk_rope_head_dim", REPLICATE


def require_heads(model: PreTrainedModel, name: str) -> Refusals:
    """Accept a projection to or from the attention heads of a model whose layers have as many."""
    yield from require_projection(model, name)
    if heads_of(model.config) is None:
        yield ", but the layers differ in their numbers of heads", "use a tp that divides all of them"


def require_key_value_groups(model: PreTrainedModel, name: str) -> Refusals:
    """Accept a Linear inside attention whose key-value heads are shared by query heads."""
    module = model.get_submodule(name)
    if not isinstance(module, nn.Linear):
        yield f", which is for Linear, not for a {type(module).__name__}", REPLICATE
    attention = attention_of(model, name)
    if attention is None:
        yield (
            ", but no module around it has num_key_value_groups to say which heads share one",
            "make it 'colwise', with a tp that divides its heads",
        )
        return
    # MiMo has twice as many key-value heads in layers with sliding attention.
    config, of_config = model.config.get_text_config(), heads_of(model.config)
    heads = config.num_attention_heads // model.get_submodule(attention).num_key_value_groups
    if of_config is None or heads != of_config.keys:
        yield (
            f", but this layer has {heads} key-value heads, and the configuration says {config.num_key_value_heads}",
            "use a tp that divides both",
        )


def require_separate_experts(model: PreTrainedModel, name: str) -> Refusals:
    """Accept stacked experts that can run without some of them."""
    module = model.get_submodule(name)
    if not can_leave_out_experts(module):
        kind = type(module).__name__
        yield f", but a {kind} cannot leave out the experts of other processes", "make it 'moe_tp_experts'"


def is_projection(module: nn.Module) -> bool:
    """Return whether a module computes what Linear or Conv1D does.

    The sharded class replaces its forward.
    """
    # Most subclasses of Linear compute more. Falcon's only writes the same product in another form.
    return type(module) is Conv1D or (isinstance(module, nn.Linear) and projects_as_linear(module))


def is_lookup(module: nn.Module) -> bool:
    """Return whether a module looks up rows as Embedding does.

    It may change the rows afterwards (Gemma scales them).
    """
    return isinstance(module, nn.Embedding) and looks_up_rows(module)


def mla_rope_width(config: PretrainedConfig | None) -> int | None:
    """Return the number of outputs of latent attention's key projection that all heads share."""
    return getattr(config, "qk_rope_head_dim", None)


def attention_of(model: nn.Module, name: str) -> str | None:
    """Return the name of the module around a key-value projection that has `num_key_value_groups`.

    That is the number of query heads that share a key-value head. None if there is no such module.
    """
    while name := name.rpartition(".")[0]:
        if isinstance(getattr(model.get_submodule(name), "num_key_value_groups", None), int):
            return name
    return None
