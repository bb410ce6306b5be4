"""AdamW that keeps its moments in bfloat16, with stochastic rounding."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from meshtrain.models.positions import mix
from meshtrain.training.fused_adamw import fused_adamw
from meshtrain.training.per_parameter import PerParameter

MOMENTS = ("exp_avg", "exp_avg_sq")
# Number of elements that are rounded at once. Each needs random numbers of 8 bytes.
CHUNK = 2**22
# Bits of a float32 that bfloat16 lacks.
LOST_BITS = 16


class RoundedAdamW(PerParameter, AdamW):
    """AdamW whose moments are in bfloat16 between steps.

    A step computes in float32, as AdamW does, one parameter after the other. Then it rounds each
    moment up or down at random, so that its mean stays right: rounding to the nearest would lose
    changes below 0.4 %, which is every change of a moment with a decay rate near 1. The random
    numbers depend on the seed, the parameter, the number of its steps and the position of the
    element in the global tensor. So they are the same on every mesh, and after a resumption.

    Args:
        groups: parameter groups, of float32 parameters.
        keys: parameter -> a number that depends on the seed and its FQN.
        places: parameter -> the positions of its elements, as `global_places` returns them.
        options: of AdamW.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        keys: Mapping[Tensor, int],
        places: Mapping[Tensor, tuple[Tensor, Tensor]],
        **options: Any,
    ) -> None:
        super().__init__(groups, **options, fused=True)
        self._keys, self._places = keys, places

    def update(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        """Update a parameter and its state; the arguments are those of `PerParameter`."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in MOMENTS}
        moments = [state[name].float() for name in MOMENTS]
        fused_adamw(group, [parameter], [gradient], moments[:1], moments[1:], [state["step"]])
        # The number of the step stays on the device, so that nothing waits for it.
        key = state["step"].long() * 0x9E3779B97F4A7C1 + self._keys[parameter]
        round_at_random(moments, [state[name] for name in MOMENTS], self._places[parameter], key)


def round_at_random(
    values: Sequence[Tensor], targets: Sequence[Tensor], places: tuple[Tensor, Tensor], key: Tensor
) -> None:
    """Round tensors to bfloat16, up or down with chances that keep their means.

    Args:
        values: finite float32 tensors of one shape, at most four.
        targets: bfloat16 tensors of that shape, which are written.
        places: of the elements, as `global_places` returns them.
        key: () int64, decides the random numbers.

    Source: Stochastic rounding and its probabilistic backward error analysis (Connolly, Higham,
        Mary, 2021).
    """
    rows, columns = places
    if values[0].numel() == 0:
        return
    pairs = [[it.view(len(rows), -1) for it in pair] for pair in zip(values, targets, strict=True)]
    height = max(1, CHUNK // len(columns))
    for start in range(0, len(rows), height):
        part = slice(start, start + height)
        noise = mix(rows[part, None] + columns, key)
        for number, (value, target) in enumerate(pairs):
            # Each tensor takes other bits of the noise.
            up = (noise >> LOST_BITS * number & (1 << LOST_BITS) - 1).int()
            bits = (value[part].view(torch.int32) + up) & -(1 << LOST_BITS)
            target[part] = bits.view(torch.float32)
