"""Find out by a cheap run what a module of an unknown class does."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.compat.nn import become, shallow_copy_with
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


def projects_as_linear(module: nn.Linear) -> bool:
    """Return whether a subclass of Linear computes the same product, perhaps in another form.

    Such a class works with a sharded weight. One that does more (adapters, quantization) does not.
    """
    if type(module) is nn.Linear:
        return True
    stream = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=stream) for shape in ((2, 3, 4), (5, 4), (5,)))
    of_probe = {"weight": nn.Parameter(weight), "bias": None if module.bias is None else nn.Parameter(bias)}
    probe = shallow_copy_with(module, of_probe)
    try:
        with torch.no_grad():
            # This calls `forward` only, because hooks of the module expect its own shapes.
            output = type(probe).forward(probe, x)
    except MISFITS:
        return False
    wanted = F.linear(x, weight, of_probe["bias"])
    return isinstance(output, Tensor) and output.shape == wanted.shape and torch.allclose(output, wanted, atol=1e-5)


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
