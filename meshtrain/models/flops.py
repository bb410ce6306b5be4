"""Floating-point operations of a model, counted from its structure."""

from collections.abc import Iterable

from torch import nn
from transformers import PretrainedConfig

from meshtrain.models.per_layer import config_of_layer


def matmul_parameters(module: nn.Module) -> int:
    """Count the parameters that every token is multiplied with: matrices, but no lookup tables."""
    return sum(
        parameter.numel()
        for child in module.modules()
        if not isinstance(child, nn.Embedding)
        for parameter in child.parameters(recurse=False)
        if parameter.dim() >= 2
    )


def flops_of_layers(layers: Iterable[nn.Module], config: PretrainedConfig, sequence_length: int) -> list[float]:
    """Return the FLOPs of each decoder layer of a model, forward and backward, per token."""
    return [
        layer_flops_per_token(layer, config_of_layer(config, index), sequence_length)
        for index, layer in enumerate(layers)
    ]


def layer_flops_per_token(layer: nn.Module, config: PretrainedConfig, sequence_length: int) -> float:
    """Return the FLOPs of one decoder layer, forward and backward, per token.

    6 per matrix parameter (2 forward, 4 backward), and 12 * seq * width / 2 for causal attention scores and values, in
    a model that has attention heads.

    Source: PaLM (arXiv:2204.02311), appendix B.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 0
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
    return 6.0 * matmul_parameters(layer) + 6.0 * sequence_length * heads * head_dim


def head_flops_per_token(head: nn.Module) -> float:
    """Return the FLOPs of the output projection, forward and backward, per token."""
    return 6.0 * matmul_parameters(head)
