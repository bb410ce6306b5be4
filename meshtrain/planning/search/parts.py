"""What the layers and heads of candidates need, for any number of sequences.

A few microbatches of each kind are simulated. The rest follows from how their needs grow.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

from meshtrain.config.machine import SpeedConfig
from meshtrain.config.mesh import MeshPlan
from meshtrain.planning.search.candidates import Candidate, HeadKind, Kind, Reshard
from meshtrain.planning.search.layers import (
    FsdpSeconds,
    LayerNeeds,
    LayerSeconds,
    around_seconds,
    fsdp_seconds,
    head_seconds,
    layer_seconds,
)
from meshtrain.planning.speed.rates import Rates

# Sequences of a microbatch that shows which work does not grow with them, such as adding gradients
# of parameters.
MORE_ROWS = 4


@dataclass
class Simulated:
    """The needs of simulated microbatches.

    Attributes:
        layers: kind of layers and sequences of a microbatch -> what layers need. There is one
            sequence for all kinds, and `MORE_ROWS` for one kind of each tp and sequence parallel.
        heads: the same for kinds of heads.
        sharded: kind of layers, and whether FSDP2 reshards after a forward pass -> what one
            sequence needs with parameters that FSDP2 shards. These are the kinds of layers with
            `MORE_ROWS`.
    """

    layers: dict[tuple[Kind, int], LayerNeeds] = field(default_factory=dict)
    heads: dict[tuple[HeadKind, int], LayerNeeds] = field(default_factory=dict)
    sharded: dict[tuple[Kind, Reshard], LayerNeeds] = field(default_factory=dict)

    def add(self, other: "Simulated") -> None:
        """Add the needs of other kinds."""
        self.layers |= other.layers
        self.heads |= other.heads
        self.sharded |= other.sharded


class Parts:
    """The layers and heads of candidates.

    Args:
        simulated: microbatches.
        speed: of the machine.
        splits_backward: whether the schedule does, which the simulated ones do not.
    """

    def __init__(self, simulated: Simulated, speed: SpeedConfig, *, splits_backward: bool = False) -> None:
        self._simulated, self._speed, self._splits_backward = simulated, speed, splits_backward
        self._kinds = {kind.cut: kind for kind, rows in simulated.layers if rows == MORE_ROWS}
        self._head_kinds = {kind.cut: kind for kind, rows in simulated.heads if rows == MORE_ROWS}
        self.seconds = cache(self._seconds)
        self._rates = cache(self._rates_alone)
        self._of_layer = cache(self._layer_seconds)
        self._of_head = cache(self._head_seconds)
        self._of_fsdp = cache(self._fsdp_seconds)

    def of_split_schedules(self) -> "Parts":
        """Return the same for schedules that split the backward pass."""
        return Parts(self._simulated, self._speed, splits_backward=True)

    def knows(self, candidate: Candidate, *, is_sharded: bool) -> bool:
        """Return whether the layers and the head of a candidate were simulated.

        Args:
            candidate: its settings.
            is_sharded: whether `needs_sharded` is true for it.
        """
        simulated, kind = self._simulated, candidate.kind
        if (kind, 1) not in simulated.layers or (candidate.head_kind, 1) not in simulated.heads:
            return False
        return not is_sharded or (self._kinds[kind.cut], candidate.reshard) in simulated.sharded

    def kept_bytes(self, kind: Kind) -> tuple[int, ...]:
        """Return what each layer keeps of a sequence until its backward pass."""
        return self._simulated.layers[kind, 1].kept_bytes

    def extra_bytes(self, kind: Kind, rows: int) -> float:
        """Return what a layer needs at most besides what is kept.

        Args:
            kind: of the layer.
            rows: sequences of the microbatch.
        """
        # The gradients of parameters do not grow with the sequences.
        fixed = _at_rows(0, (self._simulated.layers[self._kinds[kind.cut], it].extra_bytes for it in (1, MORE_ROWS)))
        return fixed + rows * max(0.0, self._simulated.layers[kind, 1].extra_bytes - fixed)

    def head_bytes(self, kind: HeadKind) -> int:
        """Return what the head and the loss of a sequence need at most."""
        return self._simulated.heads[kind, 1].head_bytes

    def _seconds(self, kind: Kind, head_kind: HeadKind, rows: int, cp: int, reshard: Reshard | None) -> LayerSeconds:
        """Return the seconds of parts for a microbatch, besides messages over data axes.

        Args:
            kind: of the layers.
            head_kind: of the head.
            rows: sequences of the microbatch.
            cp: number of processes that share each sequence.
            reshard: of FSDP2; None if nothing is sharded.
        """
        known, known_head = self._kinds[kind.cut], self._head_kinds[head_kind.cut]
        one, more = (self._of_layer(known, number) for number in (1, MORE_ROWS))
        forward, backward, around = (_at_rows(rows, pair) for pair in zip(one, more, strict=True))
        # What is recomputed grows with the sequences as the forward pass does. A backward pass also
        # has work of the parameters alone, whatever is recomputed.
        own_forward, own_backward, _ = self._of_layer(kind, 1)
        growth = forward / one[0]
        head = _at_rows(rows, (self._of_head(known_head, number) for number in (1, MORE_ROWS)))
        fsdp = self._of_fsdp(known, reshard)
        # FSDP2 does the same for parts of sequences.
        return LayerSeconds(
            forward_seconds=(own_forward * growth + around) / cp + fsdp.forward_seconds,
            backward_seconds=(backward + (own_backward - one[1]) * growth) / cp + fsdp.backward_seconds,
            stage_seconds=fsdp.stage_seconds,
            once_seconds=fsdp.once_seconds,
            # What other heads have more is the work of logits.
            head_seconds=(head + rows * (self._of_head(head_kind, 1) - self._of_head(known_head, 1))) / cp,
        )

    def _layer_seconds(self, kind: Kind, rows: int) -> tuple[float, float, float]:
        """Return the seconds of a layer, forward and backward, and its share of what is around."""
        needs, rates = self._simulated.layers[kind, rows], self._rates(kind.cut.tp)
        return *layer_seconds(needs, rates), around_seconds(needs, rates)

    def _head_seconds(self, kind: HeadKind, rows: int) -> float:
        return head_seconds(self._simulated.heads[kind, rows], self._rates(kind.cut.tp))

    def _fsdp_seconds(self, kind: Kind, reshard: Reshard | None) -> FsdpSeconds:
        alone = self._simulated.layers[kind, 1]
        sharded = alone if reshard is None else self._simulated.sharded[kind, reshard]
        return fsdp_seconds(sharded, alone, self._rates(kind.cut.tp))

    def _rates_alone(self, tp: int) -> Rates:
        return Rates(self._speed, MeshPlan(dp_shard=1, tp=tp), splits_backward=self._splits_backward)


def _at_rows(rows: int, values: Iterable[float]) -> float:
    """Return a value for a microbatch. A part of it does not grow with the sequences.

    Args:
        rows: sequences of the microbatch.
        values: for one sequence, and for `MORE_ROWS` sequences.
    """
    one, more = values
    fixed = max(0.0, one - (more - one) / (MORE_ROWS - 1))
    return fixed + rows * (one - fixed)
