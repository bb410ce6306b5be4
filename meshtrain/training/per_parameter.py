"""Optimizers whose steps update each parameter by itself."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class PerParameter(Optimizer):
    """An optimizer that updates one parameter after the other, from its gradient alone."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)

    @abstractmethod
    def update(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        """Update a parameter and its state.

        Args:
            parameter: changed in place.
            gradient: of the parameter.
            group: with the settings of the optimizer.
        """
