"""Count the floating-point operations of a model from its structure."""

from collections.abc import Iterable

from torch import nn
from transformers import PretrainedConfig

from meshtrain.models.layer_config import config_of_layer


def matmul_parameters(module: nn.Module, *, trained_only: bool = False) -> float:
    """Count the parameters that a token is multiplied with: matrices without lookup tables.

    Of experts that are stacked in one parameter, only the share that a router chooses is counted.

    Args:
        module: of a model.
        trained_only: whether frozen parameters are left out.
    """
    chosen = _chosen_experts(module)
    return sum(
        parameter.numel() * (chosen / len(parameter) if chosen and _is_stack(child, parameter) else 1)
        for child in module.modules()
        if not isinstance(child, nn.Embedding)
        for name, parameter in child.named_parameters(recurse=False)
        # The biases of stacked experts form a matrix too, but are only added.
        if parameter.dim() >= 2 and not name.endswith("bias") and (parameter.requires_grad or not trained_only)
    )


def _flops_of_matrices(module: nn.Module) -> float:
    # 2 forward and 2 for the gradient of the input, and 2 for that of a parameter that trains.
    return 4.0 * matmul_parameters(module) + 2.0 * matmul_parameters(module, trained_only=True)


def _chosen_experts(layer: nn.Module) -> int | None:
    """Return the number of experts that a token goes to in a layer, or None without experts.

    The number is read from the router, because the configuration may differ between layers.
    """
    found = (getattr(child, "top_k", None) or _asked(child) for child in layer.modules())
    return next((number for number in found if isinstance(number, int)), None)


def _asked(module: nn.Module) -> int | None:
    # Gemma 4's router has no attribute for it, and reads its configuration each time.
    return getattr(getattr(module, "config", None), "top_k_experts", None)


def _is_stack(module: nn.Module, parameter: nn.Parameter) -> bool:
    # The weight of a router has the same number of rows, but not a third dimension.
    return parameter.dim() > 2 and len(parameter) == getattr(module, "num_experts", None)


def flops_of_layers(layers: Iterable[nn.Module], config: PretrainedConfig, sequence_length: int) -> list[float]:
    """Return the FLOPs per token of each decoder layer of a model, forward and backward."""
    return [
        layer_flops_per_token(layer, config_of_layer(config, index), sequence_length)
        for index, layer in enumerate(layers)
    ]


def layer_flops_per_token(layer: nn.Module, config: PretrainedConfig, sequence_length: int) -> float:
    """Return the FLOPs per token of one decoder layer, forward and backward.

    They are 6 per matrix parameter that the token is multiplied with (2 forward, 4 backward), or 4
    if it is frozen. A model with attention heads adds 12 * seq * width / 2 for causal attention
    scores and values.

    Source: PaLM (arXiv:2204.02311), appendix B.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 0
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
    return _flops_of_matrices(layer) + 6.0 * sequence_length * heads * head_dim


def flops_of_modules(modules: Iterable[nn.Module]) -> float:
    """Return the FLOPs per token of modules around the layers, forward and backward.

    Such modules are projections and the head.
    """
    return sum(map(_flops_of_matrices, modules))
