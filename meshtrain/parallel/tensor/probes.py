"""Find out by a cheap run what a module of an unknown class does."""

import copy

import torch
from torch import Tensor, nn

from meshtrain.compat.nn import become
from meshtrain.parallel.cut.probe import MISFITS


class _Table(nn.Embedding):
    """An embedding that records the ids of each lookup, and returns rows without values."""

    asked: list[Tensor]

    def forward(self, input: Tensor) -> Tensor:
        self.asked.append(input)
        return self.weight.new_empty(*input.shape, self.weight.shape[1])


def looks_up_rows(module: nn.Embedding) -> bool:
    """Return whether an embedding looks up exactly the ids of its input.

    Such a class works with a sharded table, even if it changes the rows (Gemma scales them). A
    class that looks up other ids (positions with an offset) does not.
    """
    if type(module) is nn.Embedding:
        return True
    probe = copy.copy(module)
    become(probe, type(type(module).__name__, (type(module), _Table), {"asked": []}))
    assert isinstance(probe, _Table)
    ids = torch.zeros(1, 2, dtype=torch.long, device=module.weight.device)
    try:
        with torch.no_grad():
            # This calls `forward` only, because hooks of the module expect values.
            output = type(probe).forward(probe, ids)
    except MISFITS:
        return False
    same_shape = isinstance(output, Tensor) and output.shape == (*ids.shape, module.weight.shape[1])
    return same_shape and len(probe.asked) == 1 and probe.asked[0] is ids


def skips_index_past_end(experts: nn.Module, num_experts: int, width: int) -> bool:
    """Return whether a loop over experts skips a token with the index after the last expert.

    Args:
        experts: on the meta device; it takes hidden states, indices and weights.
        num_experts: number of experts that it holds.
        width: of a hidden state.
    """
    dtype = next(experts.parameters()).dtype
    hidden, index = torch.zeros(1, width, dtype=dtype), torch.full((1, 1), num_experts)
    try:
        with torch.no_grad():
            # A token that reaches a weight fails: the token is on the CPU, the weight on meta.
            output = type(experts).forward(experts, hidden, index, torch.zeros(1, 1, dtype=dtype))
    except MISFITS:
        return False
    return isinstance(output, Tensor) and output.shape == hidden.shape
