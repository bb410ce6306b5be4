"""AdamW that keeps its moments in 8 bits."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import AdamW

from meshtrain.config.optimizer import MOMENT_BLOCK, has_8bit_moments
from meshtrain.models.layout import blocks_shape
from meshtrain.training.dynamic_map import DynamicMap, dynamic_map
from meshtrain.training.fused_adamw import fused_adamw
from meshtrain.training.per_parameter import PerParameter

MEAN, SQUARES = "exp_avg", "exp_avg_sq"
# Whether numbers of a moment have a sign.
MOMENTS = {MEAN: True, SQUARES: False}
# Number of elements whose moments are unpacked at once. On a CPU, four times as many take longer:
# their memory is asked of the system again each time.
CHUNK = 2**20
# Parts of a large parameter: each part takes some forty operators.
MOST_PARTS = 16


def scale_of(moment: str) -> str:
    """Return the name of the state that has the scales of a moment."""
    return f"{moment}_scale"


class BlockwiseAdamW(PerParameter, AdamW):
    """AdamW whose moments have 8 bits between steps, and a scale for each block of a row.

    A step computes in float32 at least, as AdamW does, some rows at a time. Then each moment is
    rounded to the nearest level of its block. Blocks are parts of rows of the full parameter, and
    no mesh may cut one, so all meshes round alike. The moments of vectors, of small parameters and
    of rows that are no multiple of a block stay in the number format of the parameter.

    Args:
        groups: parameter groups.
        shapes: parameter -> shape of the full parameter.
        options: of AdamW.

    Source: 8-bit Optimizers via Block-wise Quantization (Dettmers et al., arXiv:2110.02861).
    """

    block_states: ClassVar[Mapping[str, int]] = {scale_of(moment): MOMENT_BLOCK for moment in MOMENTS}

    def __init__(
        self, groups: Sequence[dict[str, Any]], shapes: Mapping[Tensor, Sequence[int]], **options: Any
    ) -> None:
        super().__init__(groups, **options, fused=True)
        self._packed = {parameter for parameter, shape in shapes.items() if has_8bit_moments(shape)}
        self._maps: dict[tuple[torch.dtype, torch.device], dict[str, DynamicMap]] = {}
        for kind in {(_wide(parameter), parameter.device) for parameter in self._packed}:
            dtype, device = kind
            self._maps[kind] = {
                moment: dynamic_map(signed=signed, dtype=dtype, device=device) for moment, signed in MOMENTS.items()
            }

    def update(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        """Update a parameter and its state; the arguments are those of `PerParameter`."""
        state = self.state[parameter]
        if not state:
            state |= self._first_state(parameter)
        if parameter in self._packed:
            self._update_rows(parameter, gradient, group)
            state["step"] += 1
        else:
            fused_adamw(group, [parameter], [gradient], [state[MEAN]], [state[SQUARES]], [state["step"]])

    def _first_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        for moment in MOMENTS:
            if parameter not in self._packed:
                state[moment] = torch.zeros_like(parameter)
                continue
            # With scales of zero, every code is zero.
            state[moment] = torch.zeros_like(parameter, dtype=torch.uint8)
            shape = blocks_shape(parameter.shape, MOMENT_BLOCK)
            state[scale_of(moment)] = parameter.new_zeros(shape, dtype=_wide(parameter))
        return state

    def _update_rows(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state, wide, width = self.state[parameter], _wide(parameter), parameter.shape[-1]
        maps = self._maps[wide, parameter.device]
        rows, slopes = _as_rows(parameter.detach()), gradient.reshape(-1, max(1, width))
        kept = {moment: (_as_rows(state[moment]), _as_rows(state[scale_of(moment)])) for moment in MOMENTS}
        for part in _parts(len(rows), width):
            # The kernel counts a step of each part.
            step, numbers = state["step"].clone(), rows[part].to(wide)
            moments = {moment: maps[moment].unpack(*(it[part] for it in kept[moment])) for moment in MOMENTS}
            fused_adamw(group, [numbers], [slopes[part].to(wide)], [moments[MEAN]], [moments[SQUARES]], [step])
            for moment, values in moments.items():
                maps[moment].pack(values, *(it[part] for it in kept[moment]))
            if wide != parameter.dtype:
                rows[part] = numbers


def _wide(parameter: Tensor) -> torch.dtype:
    """Return the number format of a step and of scales: at least float32."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _as_rows(tensor: Tensor) -> Tensor:
    """Return a view with all dimensions but the last one joined."""
    return tensor.view(-1, max(1, tensor.shape[-1]))


def _parts(num_rows: int, width: int) -> Iterator[slice]:
    """Yield ranges of rows with about `CHUNK` elements, or more in `MOST_PARTS` ranges."""
    height = max(1, CHUNK // max(1, width), -(-num_rows // MOST_PARTS))
    return (slice(start, start + height) for start in range(0, num_rows, height))
