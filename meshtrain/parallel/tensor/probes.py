"""What a module of a class that nothing is known of does, found by running it where it costs nothing."""

import copy

import torch
from torch import Tensor, nn

from meshtrain.compat.nn import become
from meshtrain.parallel.cut.probe import MISFITS


class _Table(nn.Embedding):
    """Notes what it is asked for, and gives rows without values."""

    asked: list[Tensor]

    def forward(self, input: Tensor) -> Tensor:
        self.asked.append(input)
        return self.weight.new_empty(*input.shape, self.weight.shape[1])


def looks_up_rows(module: nn.Embedding) -> bool:
    """Tell whether an embedding looks up the ids that it is given, whatever it does with the rows (Gemma scales them).

    Such a class works around a sharded table. One that makes other ids of them does not (positions with an offset).
    """
    if type(module) is nn.Embedding:
        return True
    probe = copy.copy(module)
    become(probe, type(type(module).__name__, (type(module), _Table), {"asked": []}))
    assert isinstance(probe, _Table)
    ids = torch.zeros(1, 2, dtype=torch.long, device=module.weight.device)
    try:
        with torch.no_grad():
            # Not the module itself: its hooks expect values.
            output = type(probe).forward(probe, ids)
    except MISFITS:
        return False
    same_shape = isinstance(output, Tensor) and output.shape == (*ids.shape, module.weight.shape[1])
    return same_shape and len(probe.asked) == 1 and probe.asked[0] is ids


def has_place_for_none(experts: nn.Module, num_experts: int, width: int) -> bool:
    """Tell whether a loop over experts leaves out a token that goes to the expert behind the last one.

    Args:
        experts: on the meta device; it takes hidden states, indices and weights.
        num_experts: that it holds.
        width: of a hidden state.
    """
    dtype = next(experts.parameters()).dtype
    hidden, index = torch.zeros(1, width, dtype=dtype), torch.full((1, 1), num_experts)
    try:
        with torch.no_grad():
            # What reaches a weight fails: a token with values meets a weight without.
            output = type(experts).forward(experts, hidden, index, torch.zeros(1, 1, dtype=dtype))
    except MISFITS:
        return False
    return isinstance(output, Tensor) and output.shape == hidden.shape
