"""The head of a model that runs later than its base model makes the logits of the model."""

import pytest
import torch

from meshtrain.parallel.cut.stubs import Channel
from meshtrain.parallel.head.apart import HeadApart
from meshtrain.parallel.head.proof import find_base
from meshtrain.parallel.tiny_model import inputs_of, tiny_model
from tests.parallel.families import Family, resolve_family

KINDS = ["gpt2", "llama", "gemma2", "opt", "granite", "mixtral"]


@pytest.mark.parametrize("model_type", KINDS)
def test_logits_of_several_passes_are_made_later(model_type: str) -> None:
    """Gemma 2 caps its logits, and Granite scales them."""
    _, model = resolve_family(Family(model_type, dtype="float32"), (1, 1, 1, 1))
    base, copy = find_base(model), tiny_model(model, 1, dtype=torch.float32).eval()
    first = {**inputs_of(copy), "use_cache": False}
    batches = [first, {**first, "input_ids": first["input_ids"].flip(1)}]
    with torch.no_grad():
        wanted = [copy(**inputs).logits for inputs in batches]
        head, taken = HeadApart(copy, base, Channel(), keeps_gathered=False), []
        for inputs in batches:
            assert copy(**inputs).logits.shape[:2] == (1, 1)
            taken.append(head.take())
        found = [head.logits(output, is_last=False) for output in taken]
    assert not torch.equal(*wanted)
    assert all(map(torch.equal, found, wanted))
