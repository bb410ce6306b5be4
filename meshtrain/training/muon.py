"""Muon for the matrices of the layers, and AdamW for all other parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshtrain.training.fused_adamw import fused_adamw
from meshtrain.training.matrix_exchange import MatrixExchange

MOMENTUM = "momentum_buffer"
MOMENTS = ("exp_avg", "exp_avg_sq")
IS_MATRIX = "use_muon"
"""The option of a group that says whether Muon updates its parameters, and not AdamW."""
STEPS, EPSILON = 5, 1e-7
COEFFICIENTS = 3.4445, -4.7750, 2.0315


class Muon(Optimizer):
    """Moves a matrix by its momentum, whose singular values are all brought near 1.

    A step is that of `torch.optim.Muon`, with Nesterov's momentum. The momentum is kept in the
    layout of the parameter, and full matrices exist only while they are computed.

    Args:
        groups: parameter groups. `use_muon` says which of them have the matrices.
        exchange: of these matrices.
        options: `lr`, `weight_decay`, `muon_momentum` and `adjust_lr_fn`; `betas` and `eps` of
            AdamW.

    Source: Muon: an optimizer for hidden layers in neural networks (Jordan, 2024); Muon is scalable
        for LLM training (Liu et al., arXiv:2502.16982).
    """

    def __init__(self, groups: Sequence[dict[str, Any]], exchange: MatrixExchange, **options: Any) -> None:
        # AdamW counts its steps on the device, as the fused kernel needs it.
        super().__init__(groups, options | {"fused": True})
        self._exchange = exchange

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient. Collective over the processes of a stage."""
        directions: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            if group[IS_MATRIX]:
                directions |= self._directions(group)
            else:
                self._update_by_adamw(group)
        self._exchange.replace(directions, orthogonalized)
        for group in self.param_groups:
            for parameter in group["params"] if group[IS_MATRIX] else ():
                if parameter in directions:
                    scale = scale_of(self._exchange.shape(parameter), group["adjust_lr_fn"])
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(directions[parameter], alpha=-group["lr"] * scale)

    def _directions(self, group: Mapping[str, Any]) -> dict[Tensor, Tensor]:
        """Return parameter -> momentum, in the number format in which a matrix is computed."""
        found = {}
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None:
                state = self.state[parameter]
                if not state:
                    state[MOMENTUM] = torch.zeros_like(parameter)
                momentum = state[MOMENTUM]
                momentum.lerp_(gradient, 1 - group["muon_momentum"])
                found[parameter] = gradient.lerp(momentum, group["muon_momentum"]).to(computed_format(parameter.dtype))
        return found

    def _update_by_adamw(self, group: Mapping[str, Any]) -> None:
        trained: list[Tensor] = [parameter for parameter in group["params"] if parameter.grad is not None]
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        for parameter in trained:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state |= {name: torch.zeros_like(parameter) for name in MOMENTS}
        means, squares, steps = ([self.state[it][name] for it in trained] for name in (*MOMENTS, "step"))
        if trained:
            fused_adamw(group, trained, gradients, means, squares, steps)


def computed_format(dtype: torch.dtype) -> torch.dtype:
    """Return the number format in which matrices of another one are computed, and travel."""
    # torch computes in bfloat16 always. A proof in float64 needs all digits.
    return torch.float64 if dtype == torch.float64 else torch.bfloat16


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return matrices with the same singular vectors, and singular values near 1.

    Args:
        matrices: (number, rows, columns).

    Source: the Newton-Schulz iteration of torch.optim.Muon.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def scale_of(shape: tuple[int, int], adjust_lr_fn: str) -> float:
    """Return the factor of the learning rate for matrices of a shape.

    Args:
        shape: rows and columns.
        adjust_lr_fn: as `torch.optim.Muon` names it.
    """
    rows, columns = shape
    if adjust_lr_fn == "original":
        return float(max(1.0, rows / columns)) ** 0.5
    return 0.2 * float(max(rows, columns)) ** 0.5
