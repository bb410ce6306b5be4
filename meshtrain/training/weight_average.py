"""An exponential moving average of the weights, sharded as the weights are."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from meshtrain.checkpoint.dcp.store import AVERAGE_PREFIX
from meshtrain.compat.operators import interpolate
from meshtrain.config.ema import EmaConfig
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.local_parameter import laid_out_as
from meshtrain.parallel.pipeline import Pipeline


class WeightAverage:
    """The average of the trainable parameters of this process, in at least float32.

    Frozen parameters are their own average, and are left out. Buffers have none.

    Args:
        pipeline: whose parameters are averaged. They may have no values yet.
        decay: part of the average that stays at an update.
        every: number of steps between updates.
    """

    def __init__(self, pipeline: Pipeline, decay: float, every: int) -> None:
        self._decay, self._every = decay, every
        self._fqns = pipeline.canonical_names()
        self._owned = set(map(id, pipeline.owned_parameters().values()))
        self._parameters = dict(pipeline.trainable_parameters())
        self._averages = {
            name: torch.empty_like(local, dtype=torch.promote_types(local.dtype, torch.float32))
            for name, local in self._locals().items()
        }

    def tensors(self) -> list[Tensor]:
        """Return the averages, in the layout of the local parts of the parameters."""
        return list(self._averages.values())

    @torch.no_grad()
    def begin(self) -> None:
        """Set the average to the present weights."""
        for name, local in self._locals().items():
            self._averages[name].copy_(local)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the weights, if an update is due.

        Args:
            step: number of steps done.
        """
        if step % self._every == 0:
            pairs = [(average, local) for average, local in self._pairs() if local.numel()]
            interpolate(
                [average for average, _ in pairs],
                [local.to(average.dtype) for average, local in pairs],
                1.0 - self._decay,
            )

    def saved(self) -> dict[str, Tensor]:
        """Return checkpoint key -> average, without the copies of tied weights on other stages."""
        return {
            key: tensor
            for name, parameter in self._parameters.items()
            if id(parameter) in self._owned
            for key, tensor in self._laid_out(name).items()
        }

    def loaded(self) -> list[dict[str, Tensor]]:
        """Return checkpoint key -> average to fill, for each parameter."""
        return [self._laid_out(name) for name in self._parameters]

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Compute with the average inside the block. The weights are kept, and then restored."""
        with torch.no_grad():
            kept = {name: local.clone() for name, local in self._locals().items()}
            self._fill(self._averages)
            try:
                yield
            finally:
                self._fill(kept)

    def _fill(self, values: dict[str, Tensor]) -> None:
        for name, local in self._locals().items():
            local.copy_(values[name])

    def _locals(self) -> dict[str, Tensor]:
        return {name: local_tensor(parameter.detach()) for name, parameter in self._parameters.items()}

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((self._averages[name], local) for name, local in self._locals().items())

    def _laid_out(self, name: str) -> dict[str, Tensor]:
        key = f"{AVERAGE_PREFIX}{self._fqns[name]}"
        return {key: laid_out_as(self._averages[name], self._parameters[name].detach())}


def build_average(pipeline: Pipeline, config: EmaConfig) -> WeightAverage | None:
    """Return the average of a run, without values yet; None if it has none."""
    return None if config.decay is None else WeightAverage(pipeline, config.decay, config.every)
