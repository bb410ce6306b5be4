"""How many tokens each expert gets in a step of training, and the biases that balance them."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshtrain.compat.autograd import number_of_backward_pass
from meshtrain.config.mesh import PP, TOKEN_AXES
from meshtrain.config.plan import Style
from meshtrain.models.layout import local_indices, local_tensor
from meshtrain.parallel.context.parts import ContextParallel
from meshtrain.parallel.experts.stacks import expert_stacks, numbers_of_experts, selection_biases
from meshtrain.parallel.tensor.styles import STYLES
from meshtrain.runtime.mesh import all_reduce_over

_COUNTS = "meshtrain_tokens_of_experts"


def countable_stacks(model: nn.Module, styles: Mapping[str, Style]) -> dict[str, int]:
    """Return stack -> number of its experts, where it is known, and a process gets all tokens.

    Args:
        model: the full model.
        styles: FQN -> style of tensor parallelism. Rules of one's own may give a process a part.
    """
    numbers = numbers_of_experts(model).items()
    return {name: it for name, it in numbers if name not in styles or STYLES[styles[name]].gradients == "full"}


class _Watched(NamedTuple):
    """A stack whose tokens are counted, and where the bias is that its router selects with."""

    stack: nn.Module
    experts: slice
    """The places of its experts among those of all stacks."""
    bias: tuple[nn.Module, str] | None


class ExpertUse:
    """Counts the choices of the routers of a pipeline rank, without those for padding.

    Args:
        numbers: FQN of a stack of the full model -> number of its experts, on all processes.
        mesh: all axes.
        device: the device that computes.
        context: what this process does with its part of the sequences, if they are in parts.
        bias_update_rate: how far a step moves the biases with which routers select experts.
    """

    def __init__(
        self,
        numbers: Mapping[str, int],
        mesh: DeviceMesh,
        device: torch.device,
        context: ContextParallel | None = None,
        bias_update_rate: float = 0.0,
    ) -> None:
        ends = [*accumulate(numbers.values(), initial=0)]
        self._experts = {name: slice(*pair) for name, pair in zip(numbers, pairwise(ends), strict=True)}
        self._mesh, self._context, self._rate = mesh, context, bias_update_rate
        self._watched: list[_Watched] = []
        self._step = torch.zeros(ends[-1], dtype=torch.long, device=device)
        self._mask: Tensor | None = None

    def watch(self, stage: nn.Module) -> None:
        """Count the choices of the routers of a stage, which has memory already.

        The counts are buffers of the experts, which no checkpoint includes.
        """
        if not self._experts:
            return
        stage.register_forward_pre_hook(torch.compiler.disable(self._note_mask), with_kwargs=True)
        biases = selection_biases(stage)
        for name, stack in expert_stacks(stage).items():
            if name not in self._experts:
                continue
            experts = self._experts[name]
            # Numbers behind the last expert stand for none.
            counts = self._step.new_zeros(experts.stop - experts.start + 1)
            stack.register_buffer(_COUNTS, counts, persistent=False)
            # Before the hooks of tensor parallelism, which change the numbers of experts.
            stack.register_forward_pre_hook(torch.compiler.disable(self._count), prepend=True, with_kwargs=True)
            self._watched.append(_Watched(stack, experts, biases.get(name)))

    def forget(self, layer: nn.Module) -> None:
        """Leave out the stacks of a layer from now on."""
        inside = set(layer.modules())
        self._watched = [it for it in self._watched if it.stack not in inside]

    def totals(self) -> Tensor:
        """Return (experts of all stacks,) int64 what `metrics` takes, and begin again.

        They are the same on every process. Collective, unless the model has no experts.
        """
        if not self._experts:
            return self._step
        self._step = torch.zeros_like(self._step)
        for stack, experts, _ in self._watched:
            counts = stack.get_buffer(_COUNTS)
            self._step[experts] = counts[:-1]
            counts.zero_()
        return all_reduce_over(self._step, self._mesh, [*TOKEN_AXES, PP])

    @torch.no_grad()
    def move_biases(self) -> None:
        """Move each bias toward equal use of the experts in the step of the last `totals`.

        Source: auxiliary-loss-free load balancing (arXiv:2408.15664), algorithm 1.
        """
        if not self._rate:
            return
        for _, experts, where in self._watched:
            if where is None:
                continue
            bias: Tensor = getattr(*where)
            counts = self._step[experts]
            # The mean is not rounded.
            change = (counts.sum() - counts * len(counts)).sign().view(bias.shape)
            for dim, index in enumerate(local_indices(bias)):
                change = change.index_select(dim, index.to(change.device))
            own = local_tensor(bias)
            own.add_(change.to(own), alpha=self._rate)

    def metrics(self, tokens: Sequence[float], *, each: bool) -> dict[str, float]:
        """Return the metrics of a step; an empty table if nothing is counted.

        `expert_tokens_least` and `expert_tokens_most` are tokens of the experts that got the fewest
        and the most, in any layer. `expert_imbalance` is the most tokens of an expert, relative to
        the mean of its layer; the largest of all layers. It is 1 if all experts of a layer get the
        same.

        Args:
            tokens: of each expert, from `totals`.
            each: also return the tokens of each expert, as `expert_tokens/STACK/NUMBER`.
        """
        if not self._experts:
            return {}
        stacks = {name: tokens[experts] for name, experts in self._experts.items()}
        shares = [max(counts) * len(counts) / max(sum(counts), 1.0) for counts in stacks.values()]
        found = {
            "expert_tokens_least": min(tokens),
            "expert_tokens_most": max(tokens),
            "expert_imbalance": max(shares),
        }
        if each:
            for name, counts in stacks.items():
                found |= {f"expert_tokens/{name}/{number}": count for number, count in enumerate(counts)}
        return found

    def _note_mask(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._mask = kwargs.get("attention_mask")

    def _count(self, stack: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # In a backward pass the layer is computed again.
        if not stack.training or number_of_backward_pass() != -1:
            return
        _, index, *_ = *args, *kwargs.values()
        counts = stack.get_buffer(_COUNTS)
        chosen = index.flatten().clamp(max=len(counts) - 1)
        mask = self._mask if self._context is None else self._context.own_pads()
        if mask is None:
            counts.index_add_(0, chosen, torch.ones_like(chosen, dtype=counts.dtype))
        else:
            counts.index_add_(0, chosen, mask.reshape(-1, 1).to(counts.dtype).expand_as(index.flatten(1)).flatten())
