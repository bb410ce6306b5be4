"""Which positions a class gives the tokens of a batch that has none: a trial on a tiny copy."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from meshtrain.errors import ModelError
from meshtrain.parallel.tiny_model import BATCH, LENGTH, PADDED, copies_must_run, inputs_of, tiny_model, tried_once

# Relative to the largest value.
CLOSE = 1e-5


def tokens_before(pads: Tensor) -> Tensor:
    """Return (rows, seq) positions that count the tokens before each one, without padding.

    Args:
        pads: (rows, seq) 0 for padding.
    """
    return (pads.long().cumsum(-1) - 1).clamp(min=0)


@tried_once
def skips_padding(model: PreTrainedModel) -> bool:
    """Return whether positions of a class count the tokens before each one without padding.

    Otherwise they count the columns of the batch. Padding behind a text makes no difference.

    Args:
        model: stock, on the meta device; it is not changed.

    Raises:
        ModelError: if positions are found in yet another way, for example from the tokens, or if a
            tiny copy does not run.
    """
    tiny = tiny_model(model, 1).eval()
    pads = torch.ones(BATCH, LENGTH, dtype=torch.long)
    # Behind one token, which padding sees: attention to nothing is not a number.
    pads[0, 1 : 1 + PADDED] = 0
    inputs = {**inputs_of(tiny), "attention_mask": pads}
    columns = torch.arange(LENGTH).expand(BATCH, LENGTH)
    with copies_must_run(tiny), torch.no_grad():
        wanted = _logits(tiny, inputs)
        for skips, positions in ((False, columns), (True, tokens_before(pads))):
            found = _logits(tiny, {**inputs, "position_ids": positions})
            if (found - wanted).abs().max() <= CLOSE * wanted.abs().max():
                return skips
    raise ModelError(
        f"{type(model).__name__} does not count its positions from 0, with or without padding, so those of a part are "
        "not known"
    )


def _logits(tiny: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    """Return the logits of the tokens that are no padding."""
    logits: Tensor = tiny(**inputs, use_cache=False).logits
    return logits[inputs["attention_mask"].bool()]
