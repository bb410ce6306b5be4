"""Whether the language half of a multimodal model computes what the whole model does on text.

A whole model may scale its logits, or use further weights on text, so the class of its text model
alone does not show it. The two are compared on a tiny language half, in float64. It stands inside
of the whole model, whose other modules stay on meta and have no memory.
"""

import copy

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from meshtrain.compat.transformers import build, loop_over_experts
from meshtrain.errors import ModelError
from meshtrain.models.refusals import FAILURES, REFUSALS, refusal_reason
from meshtrain.models.tiny import VOCABULARY, shrink
from meshtrain.models.whole.causal_class import causal_class
from meshtrain.models.whole.half import build_whole, find_half, half_config, text_config_in

TOLERANCE = 1e-12
"""Largest difference of two logits, relative to the largest logit."""
_LAYERS, _ROWS, _LENGTH, _SEED = 2, 2, 12, 0


def check_half(config: PretrainedConfig) -> None:
    """Check on a tiny copy that the language half computes what the whole model does on text.

    Args:
        config: of the whole model.

    Raises:
        ModelError: if it does not, or if there is no tiny copy.
    """
    advice = "use a folder that holds the language model alone"
    try:
        difference = compare_on_text(config)
    except (AttributeError, ImportError, *REFUSALS, *FAILURES) as error:
        raise ModelError(
            f"whether the language half of {config.model_type} computes what the whole model does on text cannot be "
            f"checked on a tiny copy: {refusal_reason(error)}",
            advice,
        ) from error
    if not difference <= TOLERANCE:
        raise ModelError(
            f"the language half of {config.model_type} alone does not compute what the whole model does on text: "
            f"their logits differ by {difference:.0e} of the largest",
            advice,
        )


@torch.no_grad()
def compare_on_text(config: PretrainedConfig) -> float:
    """Return the largest difference of the logits of a tiny half, alone and inside of its whole."""
    whole = build_whole(_with_tiny_text(config), torch.float64)
    half = _tiny_half(whole)
    place = find_half(whole, half).where
    whole.set_submodule(place, half if type(whole.get_submodule(place)) is type(half) else half.base_model)
    head = half.get_output_embeddings()
    assert head is not None
    if whole.get_output_embeddings() is not head:
        whole.set_output_embeddings(head)
    ids = torch.randint(VOCABULARY // 2, VOCABULARY, (_ROWS, _LENGTH), generator=torch.Generator().manual_seed(_SEED))
    alone: Tensor = half(input_ids=ids, use_cache=False).logits
    inside: Tensor = whole(input_ids=ids, use_cache=False).logits
    return float((alone - inside).abs().max() / alone.abs().max())


def _with_tiny_text(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a model whose text model is tiny, and nothing else."""
    tiny = copy.deepcopy(config)
    text = text_config_in(tiny)
    assert text is not None
    small = shrink(text, _LAYERS)
    for name in tiny.sub_configs:
        if getattr(tiny, name, None) is text:
            setattr(tiny, name, small)
            return tiny
    raise ModelError(f"a {config.model_type} configuration holds its text model inside of another part")


def _tiny_half(whole: PreTrainedModel) -> PreTrainedModel:
    config = half_config(whole.config, whole)
    # Experts use a grouped matrix product by default, which does not support float64.
    loop_over_experts(config)
    kind = causal_class(config)
    assert kind is not None
    half = build(kind, config, torch.float64).eval()
    draws = torch.Generator().manual_seed(_SEED)
    for parameter in half.parameters():
        # Drawn anew, because norms start with ones and biases with zeros, which hide differences.
        parameter.copy_(torch.randn(parameter.shape, generator=draws, dtype=torch.float64) * 0.1)
    return half.double()
