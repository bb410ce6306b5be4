"""How many tokens each expert gets in a step of training, and the biases that balance them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshtrain.compat.autograd import number_of_backward_pass
from meshtrain.config.mesh import PP, TOKEN_AXES
from meshtrain.config.plan import ParallelPlan, Style
from meshtrain.config.run import RouterConfig
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


def counts_tokens(plan: ParallelPlan, router: RouterConfig, *, stock_loss: bool = False) -> bool:
    """Return whether the tokens of experts are counted, for biases or as metrics.

    The counts break the graphs of compiled layers.

    Args:
        plan: resolved.
        router: of the run.
        stock_loss: whether a program computes the loss, which has no metrics.
    """
    return bool(router.bias_update_rate) or not (stock_loss or plan.compile.enabled)


class _Watched(NamedTuple):
    """A stack whose tokens are counted, and where the bias is that its router selects with."""

    name: str
    stack: nn.Module
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
        self._numbers, self._most = numbers, max(numbers.values(), default=0)
        self._mesh, self._device = mesh, device
        self._context, self._rate = context, bias_update_rate
        self._watched: list[_Watched] = []
        self._step: Tensor | None = None
        self._mask: Tensor | None = None

    def watch(self, stage: nn.Module) -> None:
        """Count the choices of the routers of a stage, which has memory already.

        The counts are buffers of the experts, which no checkpoint includes.
        """
        if not self._numbers:
            return
        stage.register_forward_pre_hook(torch.compiler.disable(self._note_mask), with_kwargs=True)
        biases = selection_biases(stage)
        for name, stack in expert_stacks(stage).items():
            if name not in self._numbers:
                continue
            # Indices past the last expert mean that none is chosen.
            counts = torch.zeros(self._most + 1, dtype=torch.long, device=self._device)
            stack.register_buffer(_COUNTS, counts, persistent=False)
            # Before the hooks of tensor parallelism, which change the indices of experts.
            stack.register_forward_pre_hook(torch.compiler.disable(self._count), prepend=True, with_kwargs=True)
            self._watched.append(_Watched(name, stack, biases.get(name)))

    def forget(self, layer: nn.Module) -> None:
        """Leave out the stacks of a layer from now on."""
        inside = set(layer.modules())
        self._watched = [it for it in self._watched if it.stack not in inside]

    def totals(self) -> Tensor:
        """Return (3,) float64 what `metrics` takes, the same on every process, and begin again.

        Collective, unless the model has no experts.
        """
        found = torch.zeros(3, dtype=torch.float64, device=self._device)
        if self._watched:
            buffers = [it.stack.get_buffer(_COUNTS) for it in self._watched]
            counts = all_reduce_over(torch.cat(buffers), self._mesh, TOKEN_AXES)
            for buffer in buffers:
                buffer.zero_()
            self._step = counts.view(len(buffers), -1)[:, :-1]
            counts = self._step.double()
            numbers = torch.tensor([self._numbers[it.name] for it in self._watched], device=self._device)[:, None]
            is_expert = torch.arange(self._most, device=self._device) < numbers
            shares = counts * numbers / counts.sum(1, keepdim=True).clamp(min=1)
            # The smallest is negative, so that the largest of all three is taken.
            found = torch.stack([-counts.masked_fill(~is_expert, torch.inf).min(), counts.max(), shares.max()])
        elif self._most:
            found[0] = -torch.inf
        return all_reduce_over(found, self._mesh, [PP], dist.ReduceOp.MAX) if self._most else found

    def of_each(self) -> Tensor:
        """Return (experts of all stacks,) float64 the tokens of each in the step of `totals`.

        They are the same on every process. Collective.
        """
        found = {name: torch.zeros(it, dtype=torch.float64, device=self._device) for name, it in self._numbers.items()}
        if self._step is not None:
            for (name, _, _), counts in zip(self._watched, self._step, strict=True):
                found[name] = counts[: self._numbers[name]].double()
        return all_reduce_over(torch.cat([*found.values()]), self._mesh, [PP])

    @torch.no_grad()
    def move_biases(self) -> None:
        """Move each bias toward equal use of the experts in the step of the last `totals`.

        Source: auxiliary-loss-free load balancing (arXiv:2408.15664), algorithm 1.
        """
        if not self._rate or self._step is None:
            return
        for (name, _, where), counts in zip(self._watched, self._step, strict=True):
            if where is None:
                continue
            number = self._numbers[name]
            bias: Tensor = getattr(*where)
            # The mean is not rounded.
            change = (counts[:number].sum() - counts[:number] * number).sign().view(bias.shape)
            for dim, index in enumerate(local_indices(bias)):
                change = change.index_select(dim, index.to(change.device))
            own = local_tensor(bias)
            own.add_(change.to(own), alpha=self._rate)

    def metrics(self, least: float, most: float, imbalance: float, *each: float) -> dict[str, float]:
        """Return the metrics of a step; an empty table if nothing is counted.

        Args:
            least: tokens of the expert that got the fewest, in any layer, times -1.
            most: tokens of the expert that got the most, in any layer.
            imbalance: most tokens of an expert, relative to the mean of its layer; the largest of
                all layers. 1 if all experts of a layer get the same.
            each: from `of_each`, if the tokens of each expert are metrics.
        """
        if not self._most:
            return {}
        found = {"expert_tokens_least": -least, "expert_tokens_most": most, "expert_imbalance": imbalance}
        if not each:
            return found
        experts = [f"{name}/{expert}" for name, number in self._numbers.items() for expert in range(number)]
        return found | {f"expert_tokens/{expert}": tokens for expert, tokens in zip(experts, each, strict=True)}

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
