"""The longest sequence of a batch, on which the frequencies of some rotary modules depend.

Such a module reads the positions of a forward pass, and a single process passes the full batch. So
every row must get the frequencies of the full batch, in any microbatch and on any data rank.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshtrain.compat.autograd import map_tensors
from meshtrain.config.mesh import DATA_AXES, TOKEN_AXES
from meshtrain.models.rotary import apply_sequence_length, grown_length, length_dependent
from meshtrain.parallel.cut.stage import Stage
from meshtrain.runtime.mesh import all_reduce_over, axis_size


class RotaryLength:
    """The length of a batch's longest sequence, passed to the rotary modules of all stages.

    In every forward pass of a batch, the modules receive one additional position: the last position
    of the longest sequence. The row of that position is then removed from their tables.

    Args:
        stages: of this process.
        mesh: all processes.
        device: the device that computes.
    """

    def __init__(self, stages: tuple[Stage, ...], mesh: DeviceMesh, device: torch.device) -> None:
        self._models = [stage.model for stage in stages]
        self._mesh, self._device = mesh, device
        self._last_position: int | None = None
        self._modules = [module for model in self._models for module in length_dependent(model).values()]
        for module in self._modules:
            module.register_forward_pre_hook(self._add_position, with_kwargs=True)
            module.register_forward_hook(self._take_out)

    @contextmanager
    def of(self, batch: Mapping[str, Any]) -> Iterator[None]:
        """Call `begin` before the forward passes over parts of a batch, and `end` after them."""
        self.begin(batch)
        try:
            yield
        finally:
            self.end()

    def begin(self, batch: Mapping[str, Any], *, is_alone: bool = False) -> None:
        """Find the longest sequence. Collective over the dp axes, if anything depends on it.

        Args:
            is_alone: whether this data rank computes its part alone, without the others.
            batch: the part of this data rank: `input_ids` (rows, seq) or `inputs_embeds`, and
                optionally `position_ids`.
        """
        positions = batch.get("position_ids")
        tokens = batch.get("inputs_embeds") if batch.get("input_ids") is None else batch["input_ids"]
        is_only = axis_size(self._mesh, *TOKEN_AXES) == 1
        if not self._modules or tokens is None or (is_only and positions is None):
            # In the last case every forward pass has all columns of the batch anyway.
            return
        length = tokens.shape[1] if positions is None else int(positions.max()) + 1
        # Since then, a data rank alone may have computed a longer sequence, without gradients.
        longest = length
        if not is_alone:
            longest, grown = self._largest(length, grown_length(self._models[0]))
            self._see(grown)
        self._last_position = longest - 1

    def end(self) -> None:
        """Let every forward pass use its own positions again."""
        self._last_position = None

    def grown(self) -> int:
        """Return the largest length of dynamic frequencies on any data rank, in tokens. Collective.

        The result is 0 if the frequencies have not grown.
        """
        return self._largest(grown_length(self._models[0]))[0] if self._modules else 0

    def restore(self, grown: int) -> None:
        """Restore the frequencies that were used when `grown` returned this value."""
        for model in self._models:
            # A short sequence resets the frequencies.
            apply_sequence_length(model, 1)
        self._see(grown)

    def _see(self, grown: int) -> None:
        for model in self._models:
            if grown > grown_length(model):
                apply_sequence_length(model, grown)

    def _largest(self, *lengths: int) -> list[int]:
        own = torch.tensor(lengths, device=self._device)
        largest: list[int] = all_reduce_over(own, self._mesh, DATA_AXES, dist.ReduceOp.MAX).tolist()
        return largest

    def _add_position(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._last_position is None:
            return None
        positions: Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        last = positions.new_full((*positions.shape[:-1], 1), self._last_position)
        positions = torch.cat([positions, last], dim=-1)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": positions}
        return (args[0], positions, *args[2:]), kwargs

    def _take_out(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._last_position is None:
            return None
        # Tables are (batch, seq, head_dim).
        return map_tensors(lambda table: table[..., :-1, :], output)
