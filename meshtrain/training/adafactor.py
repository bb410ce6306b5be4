"""Adafactor: an optimizer that keeps a number for each row and column of a matrix."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.optim import Optimizer

from meshtrain.models.layout import reduced_shape
from meshtrain.training.sharded_sums import PartialSum, ShardedSums

ROWS, COLUMNS, VARIANCE = "row_var", "col_var", "variance"
SMALLEST_RMS = 1e-3
"""Parameters that are smaller than this move as if they were that large, as in torch."""
_Trained = Mapping[Tensor, Mapping[str, Any]]
"""Parameters that have a gradient -> their groups."""


class Adafactor(Optimizer):
    """Divides gradients by a mean of their squares that is known by its rows and columns alone.

    A step is that of `torch.optim.Adafactor`. Means over rows, over columns and over full
    parameters are completed over the mesh, in three short messages for an axis. The direction of a
    step is computed twice, once for its size, so that those of all parameters never exist at once.

    Args:
        groups: parameter groups.
        sums: of their parameters.
        options: `lr`, `beta2_decay`, `clipping_threshold` (`d` in torch) and `weight_decay`.

    Source: Adafactor: Adaptive Learning Rates with Sublinear Memory Cost (Shazeer, Stern,
        arXiv:1804.04235).
    """

    reduced_states: ClassVar[Mapping[str, int]] = {ROWS: -1, COLUMNS: -2}

    def __init__(self, groups: Sequence[dict[str, Any]], sums: ShardedSums, **options: Any) -> None:
        # Steps are counted on the device, so that nothing waits for it.
        super().__init__(groups, options | {"fused": True})
        self._sums = sums

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient. Collective over the processes of a stage."""
        trained = {
            parameter: group
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }
        for parameter in trained:
            self._begin(parameter)
        sizes = self._update_means(trained)
        means = self._means_of_rows(trained)
        squares = self._sums.complete(
            [PartialSum(it, vector_norm(self._direction(it, means), dtype=_wide(it)).square(), None) for it in trained]
        )
        for (parameter, group), square in zip(trained.items(), squares, strict=True):
            too_large = self._rms(parameter, square) / group["clipping_threshold"]
            rate = self._rate(parameter, group, sizes[parameter]) / too_large.clamp(min=1.0)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(self._direction(parameter, means).mul_(rate.to(parameter.dtype)))

    def _begin(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            if parameter.dim() > 1:
                for name, dim in self.reduced_states.items():
                    state[name] = parameter.new_zeros(reduced_shape(parameter.shape, dim))
            else:
                state[VARIANCE] = torch.zeros_like(parameter)
        state["step"] += 1

    def _update_means(self, trained: _Trained) -> dict[Tensor, Tensor]:
        """Update the means of the squared gradients, and return the RMS of each parameter."""
        partial = []
        for it in trained:
            partial.append(PartialSum(it, vector_norm(it, dtype=_wide(it)).square(), None))
            if it.dim() > 1:
                partial += [PartialSum(it, _squares(it, dim), dim) for dim in self.reduced_states.values()]
        found = iter(self._sums.complete(partial))
        sizes = {}
        for parameter, group in trained.items():
            sizes[parameter] = self._rms(parameter, next(found))
            state, shape = self.state[parameter], self._sums.shape(parameter)
            weight = state["step"].double() ** group["beta2_decay"]
            if parameter.dim() > 1:
                for name, dim in self.reduced_states.items():
                    mean = (next(found) / shape[dim]).to(state[name].dtype)
                    state[name].lerp_(mean, weight.to(mean.dtype))
            else:
                assert parameter.grad is not None
                state[VARIANCE].lerp_(parameter.grad.square(), weight.to(parameter.dtype))
        return sizes

    def _means_of_rows(self, trained: _Trained) -> dict[Tensor, Tensor]:
        """Return matrix -> the mean over its rows of what is kept for them."""
        partial = [
            PartialSum(it, self.state[it][ROWS].sum(-2, keepdim=True, dtype=_wide(it)), -2)
            for it in trained
            if it.dim() > 1
        ]
        sums = self._sums.complete(partial)
        return {
            it.parameter: (total / self._sums.shape(it.parameter)[-2]).to(it.parameter.dtype)
            for it, total in zip(partial, sums, strict=True)
        }

    def _direction(self, parameter: Tensor, means_of_rows: Mapping[Tensor, Tensor]) -> Tensor:
        """Return the gradient, divided by the root of the mean of its squares."""
        state, epsilon = self.state[parameter], torch.finfo(parameter.dtype).eps
        if parameter.dim() > 1:
            variance = state[ROWS] @ state[COLUMNS]
            variance.div_(means_of_rows[parameter].clamp(min=epsilon))
        else:
            variance = state[VARIANCE].clone()
        assert parameter.grad is not None
        return variance.clamp_(min=epsilon * epsilon).rsqrt_().mul_(parameter.grad)

    def _rate(self, parameter: Tensor, group: Mapping[str, Any], size: Tensor) -> Tensor:
        """Return how far a parameter moves in a direction of RMS 1.

        Args:
            parameter: that moves.
            group: its group.
            size: () RMS of the parameter.
        """
        relative = self.state[parameter]["step"].double().rsqrt().clamp(max=group["lr"])
        return size.double().clamp(min=SMALLEST_RMS) * relative

    def _rms(self, parameter: Tensor, square: Tensor) -> Tensor:
        """Return the root of the mean of the squares of a full parameter, from their sum."""
        return (square / self._sums.shape(parameter).numel()).sqrt()


def _squares(parameter: Tensor, dim: int) -> Tensor:
    """Return the sums of the squares of a gradient over a dimension, which stays with size 1."""
    assert parameter.grad is not None
    # A norm needs no tensor of the size of the gradient.
    return vector_norm(parameter.grad, dim=dim, keepdim=True, dtype=_wide(parameter)).square_()


def _wide(parameter: Tensor) -> torch.dtype:
    """Return the number format of sums that travel: at least float32."""
    return torch.promote_types(parameter.dtype, torch.float32)
