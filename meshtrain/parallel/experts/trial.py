"""A trial of stacked experts: rows of single choices give what all choices give together."""

import torch
from transformers import PreTrainedModel

from meshtrain.parallel.experts.stacks import expert_stacks, num_experts
from meshtrain.parallel.tiny_model import copies_must_run, tiny_model, tried_once

ROWS, CHOICES = 6, 2
# Some experts compute their activation in float32 (Beam). Others than sums differ far more.
TOLERANCE = 1e-5


@tried_once
def sums_weighted_results(model: PreTrainedModel) -> bool:
    """Return whether experts return the sum of their results, each multiplied by its weight.

    The exchange of tokens relies on it: experts compute rows with the weight 1, and the rank of a
    token multiplies and sums the results.

    Raises:
        ModelError: if no tiny copy of the model runs.
    """
    tiny = tiny_model(model, 1)
    stream = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, tiny.config.get_text_config().hidden_size, generator=stream, dtype=torch.float64)
    weights = torch.rand(ROWS, CHOICES, generator=stream, dtype=torch.float64)
    with torch.no_grad(), copies_must_run(tiny):
        for stack in expert_stacks(tiny).values():
            index = torch.rand(ROWS, num_experts(stack), generator=stream).topk(CHOICES).indices
            # The exchange passes all three by position, in this order.
            found = stack(hidden, index, weights)
            ones = torch.ones(ROWS, 1, dtype=torch.float64)
            apart = [stack(hidden, index[:, [choice]], ones) * weights[:, [choice]] for choice in range(CHOICES)]
            if found.shape != hidden.shape or not torch.allclose(found, sum(apart), rtol=TOLERANCE, atol=TOLERANCE):
                return False
    return True
