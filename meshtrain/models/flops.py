"""Floating-point operations of a model, counted from its structure."""

from collections.abc import Iterable

from torch import nn
from transformers import PretrainedConfig

from meshtrain.models.layer_config import config_of_layer


def matmul_parameters(module: nn.Module) -> float:
    """Count the parameters that a token is multiplied with: matrices, but no lookup tables.

    Of experts that are stacked in one parameter it meets those that its router chooses: their share of the parameter.
    """
    chosen = _chosen_experts(module)
    return sum(
        parameter.numel() * (chosen / len(parameter) if chosen and _is_stack(child, parameter) else 1)
        for child in module.modules()
        if not isinstance(child, nn.Embedding)
        for name, parameter in child.named_parameters(recurse=False)
        # The biases of stacked experts are rows in a matrix too.
        if parameter.dim() >= 2 and not name.endswith("bias")
    )


def _chosen_experts(layer: nn.Module) -> int | None:
    """Return how many experts a token goes to in a layer, by its router: a configuration may differ between layers."""
    found = (getattr(child, "top_k", None) or _asked(child) for child in layer.modules())
    return next((number for number in found if isinstance(number, int)), None)


def _asked(module: nn.Module) -> int | None:
    # Gemma 4's router asks its configuration each time.
    return getattr(getattr(module, "config", None), "top_k_experts", None)


def _is_stack(module: nn.Module, parameter: nn.Parameter) -> bool:
    # A router has the number too, but no third dimension.
    return parameter.dim() > 2 and len(parameter) == getattr(module, "num_experts", None)


def flops_of_layers(layers: Iterable[nn.Module], config: PretrainedConfig, sequence_length: int) -> list[float]:
    """Return the FLOPs of each decoder layer of a model, forward and backward, per token."""
    return [
        layer_flops_per_token(layer, config_of_layer(config, index), sequence_length)
        for index, layer in enumerate(layers)
    ]


def layer_flops_per_token(layer: nn.Module, config: PretrainedConfig, sequence_length: int) -> float:
    """Return the FLOPs of one decoder layer, forward and backward, per token.

    6 per matrix parameter that the token meets (2 forward, 4 backward), and 12 * seq * width / 2 for causal attention
    scores and values, in a model that has attention heads.

    Source: PaLM (arXiv:2204.02311), appendix B.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 0
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
    return 6.0 * matmul_parameters(layer) + 6.0 * sequence_length * heads * head_dim


def flops_of_modules(modules: Iterable[nn.Module]) -> float:
    """Return the FLOPs of modules around the layers (projections, head), forward and backward, per token."""
    return 6.0 * sum(map(matmul_parameters, modules))
