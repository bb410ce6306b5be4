"""Whether a class may compute documents alone: a tiny copy is tried, and no class is listed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.compat.transformers import attention_implementation
from meshtrain.errors import ModelError
from meshtrain.models.build import stock_class
from meshtrain.parallel.context.attention import further_tensors
from meshtrain.parallel.cut.probe import MISFITS, no_router_logits
from meshtrain.parallel.documents.mask import SegmentedMask
from meshtrain.parallel.stage_attention import StageAttention
from meshtrain.parallel.tiny_model import tiny_model, tried_once

# Of the documents in each row: more tokens than two windows of a tiny copy, one token, and others.
LENGTHS = ((11, 1, 4), (2, 9, 5))
# Pieces of a row, as cp makes them, whose borders lie in documents and in windows.
PIECES = ((0, 6), (6, 9), (9, 16))
CLOSE = 1e-5
"""Largest difference that is rounding, relative to the largest value: classes cast to float32."""
SMALLEST = 1e-3
"""Smallest scale of a value, relative to the largest of all."""


@tried_once
def why_not_alone(model: PreTrainedModel) -> str | None:
    """Return why attention of a model cannot compute each document alone; None if it can.

    A tiny copy computes the logits and gradients of packed documents like this, and those of rows
    of one document each as it is. Both must be equal.

    Args:
        model: stock, on the meta device; it is not changed.
    """
    name = stock_class(model).__name__
    try:
        tiny = tiny_model(model, 1).eval()
        wanted = _results(tiny, _alone)
    except (ModelError, *MISFITS) as error:
        return f"no tiny copy of a {name} runs ({type(error).__name__}: {_first_line(error)})"
    base = attention_implementation(tiny.config.get_text_config())
    assert base is not None, "the tiny copy has no attention implementation"
    attention = _Counted(base, by_documents=True, pieces=PIECES)
    attention.watch(tiny)
    try:
        found = _results(tiny, _packed)
    except MISFITS as error:
        return f"{name} uses the mask itself ({type(error).__name__}: {_first_line(error)})"
    if attention.unknown:
        return f"the attention of {name} gets {sorted(attention.unknown)[0]} too"
    if not attention.calls:
        return f"{name} does not compute attention through the interface of transformers"
    largest = max(float(value.abs().max()) for value in wanted.values())
    for what, value in wanted.items():
        scale = max(float(value.abs().max()), SMALLEST * largest)
        if not torch.allclose(found[what], value, rtol=0.0, atol=CLOSE * scale):
            return f"{what} of a tiny {name} would differ"
    return None


class _Counted(StageAttention):
    """Attention that counts its calls for documents, and notes what only code of a class reads."""

    calls = 0

    def __init__(self, base: str, **options: Any) -> None:
        super().__init__(base, **options)
        self.unknown: set[str] = set()

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        self.calls += isinstance(attention_mask, SegmentedMask)
        self.unknown |= further_tensors(kwargs)
        return super().attend(module, query, key, value, attention_mask, **kwargs)


def _results(tiny: PreTrainedModel, logits_of: Callable[[PreTrainedModel, Tensor], Tensor]) -> dict[str, Tensor]:
    """Return the logits, and the gradient of every parameter that has one."""
    stream = torch.Generator().manual_seed(1)
    ids = torch.randint(2, tiny.config.get_text_config().vocab_size, (sum(map(sum, LENGTHS)),), generator=stream)
    logits = logits_of(tiny, ids)
    weights = torch.randn(logits.shape, generator=stream, dtype=logits.dtype)
    parameters = {name: it for name, it in tiny.named_parameters() if it.requires_grad}
    found = torch.autograd.grad((logits * weights).sum(), [*parameters.values()], allow_unused=True)
    gradients = zip(parameters, found, strict=True)
    return {
        "the logits": logits.detach(),
        **{f"the gradient of {name}": value for name, value in gradients if value is not None},
    }


def _alone(tiny: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the (tokens, vocab) logits of the documents, each in a row of its own."""
    parts = ids.split([length for row in LENGTHS for length in row])
    return torch.cat([_logits(tiny, part.unsqueeze(0)) for part in parts], 1).squeeze(0)


def _packed(tiny: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the (tokens, vocab) logits of the documents, packed into rows."""
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
    return _logits(tiny, ids.view_as(positions), position_ids=positions).flatten(0, 1)


def _logits(tiny: PreTrainedModel, ids: Tensor, **inputs: Tensor) -> Tensor:
    logits: Tensor = tiny(input_ids=ids, **inputs, use_cache=False, **no_router_logits(tiny)).logits
    return logits


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
