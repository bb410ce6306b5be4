"""How many tokens each expert gets in a step of training, and the biases that balance them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshtrain.compat.autograd import number_of_backward_pass
from meshtrain.config.mesh import PP, TOKEN_AXES
from meshtrain.models.layout import local_indices, local_tensor
from meshtrain.parallel.context.parts import ContextParallel
from meshtrain.parallel.experts.stacks import expert_stacks, selection_biases
from meshtrain.runtime.mesh import all_reduce_over

_COUNTS = "meshtrain_tokens_of_experts"


class ExpertUse:
    """Counts the choices of the routers of a pipeline rank, without those for padding.

    Args:
        numbers: of the experts of each stack of the full model.
        mesh: all axes.
        device: the device that computes.
        context: what this process does with its part of the sequences, if they are in parts.
        bias_update_rate: how far a step moves the biases with which routers select experts.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        mesh: DeviceMesh,
        device: torch.device,
        context: ContextParallel | None = None,
        bias_update_rate: float = 0.0,
    ) -> None:
        self._most, self._mesh, self._device = max(numbers, default=0), mesh, device
        self._context, self._rate = context, bias_update_rate
        self._stacks: list[nn.Module] = []
        self._numbers: list[int] = []
        self._biases: list[tuple[nn.Module, str] | None] = []
        self._step: Tensor | None = None
        self._mask: Tensor | None = None

    def watch(self, stage: nn.Module, numbers: Mapping[str, int]) -> None:
        """Count the choices of the routers of a stage, which has memory already.

        The counts are buffers of the experts, which no checkpoint includes.

        Args:
            stage: the model of the stage.
            numbers: FQN of a stack -> number of its experts, on all processes.
        """
        stage.register_forward_pre_hook(torch.compiler.disable(self._note_mask), with_kwargs=True)
        biases = selection_biases(stage)
        for name, stack in expert_stacks(stage).items():
            if name not in numbers:
                # The class does not say how many there are.
                continue
            # Numbers behind the last expert stand for none.
            counts = torch.zeros(self._most + 1, dtype=torch.long, device=self._device)
            stack.register_buffer(_COUNTS, counts, persistent=False)
            # Before the hooks of tensor parallelism, which change the numbers of experts.
            stack.register_forward_pre_hook(torch.compiler.disable(self._count), prepend=True, with_kwargs=True)
            self._stacks.append(stack)
            self._numbers.append(numbers[name])
            self._biases.append(biases.get(name))

    def totals(self) -> Tensor:
        """Return (3,) float64 what `metrics` takes, the same on every process, and begin again.

        Collective, unless the model has no experts.
        """
        found = torch.zeros(3, dtype=torch.float64, device=self._device)
        if self._stacks:
            counts = torch.cat([stack.get_buffer(_COUNTS) for stack in self._stacks])
            for stack in self._stacks:
                stack.get_buffer(_COUNTS).zero_()
            self._step = all_reduce_over(counts, self._mesh, TOKEN_AXES).view(len(self._stacks), -1)[:, :-1]
            counts = self._step.double()
            numbers = torch.tensor(self._numbers, device=self._device)[:, None]
            is_expert = torch.arange(self._most, device=self._device) < numbers
            shares = counts * numbers / counts.sum(1, keepdim=True).clamp(min=1)
            # The smallest is negative, so that the largest of all three is taken.
            found = torch.stack([-counts.masked_fill(~is_expert, torch.inf).min(), counts.max(), shares.max()])
        elif self._most:
            found[0] = -torch.inf
        return all_reduce_over(found, self._mesh, [PP], dist.ReduceOp.MAX) if self._most else found

    @torch.no_grad()
    def move_biases(self) -> None:
        """Move each bias toward equal use of the experts in the step of the last `totals`.

        Source: auxiliary-loss-free load balancing (arXiv:2408.15664), algorithm 1.
        """
        if not self._rate or self._step is None:
            return
        for found, number, counts in zip(self._biases, self._numbers, self._step, strict=True):
            if found is None:
                continue
            bias: Tensor = getattr(*found)
            # The mean is not rounded.
            change = (counts[:number].sum() - counts[:number] * number).sign().view(bias.shape)
            for dim, index in enumerate(local_indices(bias)):
                change = change.index_select(dim, index.to(change.device))
            own = local_tensor(bias)
            own.add_(change.to(own), alpha=self._rate)

    def metrics(self, least: float, most: float, imbalance: float) -> dict[str, float]:
        """Return the metrics of a step; an empty table if nothing is counted.

        Args:
            least: tokens of the expert that got the fewest, in any layer, times -1.
            most: tokens of the expert that got the most, in any layer.
            imbalance: most tokens of an expert, relative to the mean of its layer; the largest of
                all layers. 1 if all experts of a layer get the same.
        """
        if not self._most:
            return {}
        return {"expert_tokens_least": -least, "expert_tokens_most": most, "expert_imbalance": imbalance}

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
        # A rule of one's own may give a process a part of the tokens.
        if mask is None or mask.numel() != len(index):
            counts.index_add_(0, chosen, torch.ones_like(chosen, dtype=counts.dtype))
        else:
            counts.index_add_(0, chosen, mask.reshape(-1, 1).to(counts.dtype).expand_as(index.flatten(1)).flatten())
