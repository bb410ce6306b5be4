"""How many tokens each expert gets in a step of training, over all processes."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshtrain.compat.autograd import number_of_backward_pass
from meshtrain.config.mesh import PP, TOKEN_AXES
from meshtrain.parallel.experts.stacks import expert_stacks
from meshtrain.runtime.mesh import all_reduce_over


class ExpertUse:
    """Counts the choices of the routers.

    Args:
        model: the full model, before it is cut. Its stacked experts are counted.
        mesh: all axes.
        device: the device that computes.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
        numbers = {name: getattr(stack, "num_experts", None) for name, stack in expert_stacks(model).items()}
        self._numbers: Mapping[str, int] = {name: number for name, number in numbers.items() if number}
        self._mesh, self._device = mesh, device
        self._counts: dict[str, Tensor] = {}
        self._is_watching = False
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the counts of the step before."""
        self._counts = {name: self._zeros(number) for name, number in self._numbers.items()}

    def watch(self, model: nn.Module) -> None:
        """Count the choices of the routers of a stage. Call it before tensor parallelism.

        Args:
            model: of the stage.
        """
        self._is_watching = bool(self._numbers)
        for name, stack in expert_stacks(model).items():
            if name in self._numbers:
                stack.register_forward_pre_hook(torch.compiler.disable(partial(self._count, name)), with_kwargs=True)

    def _count(self, name: str, stack: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # In a backward pass the layer is computed again.
        if stack.training and number_of_backward_pass() == -1:
            _, index, *_ = *args, *kwargs.values()
            # Numbers behind the last expert stand for none, or for one that is not in the stack.
            chosen = index.flatten().long().clamp(max=self._numbers[name])
            self._counts[name] = self._counts[name].index_add(0, chosen, torch.ones_like(chosen))

    def totals(self) -> Tensor:
        """Return (3,) what `metrics` takes, the same on every process. Collective."""
        if not self._is_watching:
            return torch.zeros(3, dtype=torch.float64, device=self._device)
        counts = torch.cat([counted[:-1] for counted in self._counts.values()])
        together = all_reduce_over(counts, self._mesh, (PP, *TOKEN_AXES)).double()
        layers = together.split([*self._numbers.values()])
        imbalance = torch.stack([of_layer.max() / of_layer.mean().clamp(min=1e-9) for of_layer in layers]).max()
        return torch.stack([together.min(), together.max(), imbalance])

    def metrics(self, least: float, most: float, imbalance: float) -> dict[str, float]:
        """Return the metrics of a step; an empty table if nothing is counted.

        Args:
            least: tokens of the expert that got the fewest, in any layer.
            most: tokens of the expert that got the most, in any layer.
            imbalance: most tokens of an expert, relative to the mean of its layer; the largest of
                all layers. 1 if all experts of a layer get the same.
        """
        if not self._is_watching:
            return {}
        return {"expert_tokens_least": least, "expert_tokens_most": most, "expert_imbalance": imbalance}

    def _zeros(self, number: int) -> Tensor:
        return torch.zeros(number + 1, dtype=torch.long, device=self._device)
