"""What one layer and the head need, from simulated steps of the whole model in one stage."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshtrain.compat.operators_seen import HOOK
from meshtrain.compat.schedules import BACKWARD, FORWARD
from meshtrain.planning.simulation.profile import ROLES, ActionProfile, RankProfile
from meshtrain.planning.simulation.recorder import HEAD, Role, Work
from meshtrain.planning.speed.rates import Rates

# The first one, those that are alike, and the last one.
MICROBATCHES = 3
_KEPT = [ROLES.index(role) for role in (Role.ACTIVATIONS, Role.LOSS)]


@dataclass(frozen=True)
class LayerNeeds:
    """What parts of a model need for a microbatch, on one process of tp.

    Attributes:
        kept_bytes: of each layer, from its forward to its backward pass.
        head_bytes: at most, in the head and the loss.
        extra_bytes: at most besides what is kept, in the backward pass of a layer.
        forward_work: of each layer.
        backward_work: of each layer, with recomputation.
        head_work: of the head and the loss, forward and backward.
        around_work: of the rest: the embedding, and what FSDP2 does before the layers.
        passes: phase and microbatch -> all work of this pass.
    """

    kept_bytes: tuple[int, ...]
    head_bytes: int
    extra_bytes: int
    forward_work: tuple[tuple[Counter[Work] | Work, ...], ...]
    backward_work: tuple[tuple[Counter[Work] | Work, ...], ...]
    head_work: tuple[Counter[Work] | Work, ...]
    around_work: tuple[Counter[Work] | Work, ...]
    passes: Mapping[tuple[str, int], tuple[Counter[Work] | Work, ...]]


def layer_needs(profile: RankProfile, num_layers: int) -> LayerNeeds:
    """Return what the layers of a step need, from the second of its microbatches and the last one.

    Args:
        profile: of a process that holds the whole model, with three microbatches.
        num_layers: of the model.
    """
    actions = [action for action in profile.actions if action.microbatch == 1]
    forward = [action for action in actions if action.phase == FORWARD]
    backward = [action for action in actions if action.phase == BACKWARD]
    layers = range(num_layers)
    # The backward pass of the embedding belongs to the first layer.
    inner = set(layers[1:]) or set(layers)
    rest = [action for action in actions if not isinstance(action.place, int)]
    levels = np.concatenate([_kept(action) for action in rest]).cumsum() if rest else np.zeros(1)
    return LayerNeeds(
        kept_bytes=tuple(sum(int(_kept(action).sum()) for action in forward if action.place == it) for it in layers),
        head_bytes=int(max(levels.max(initial=0), 0)),
        extra_bytes=max(_rise(action) for action in backward if action.place in inner),
        forward_work=tuple(_work(forward, it) for it in layers),
        backward_work=tuple(_work(backward, it) for it in layers),
        head_work=tuple(work for action in rest if action.place == HEAD for work in action.work),
        around_work=tuple(work for action in rest if action.place != HEAD for work in action.work),
        passes={(phase, it): _pass(profile, phase, it) for phase in (FORWARD, BACKWARD) for it in range(MICROBATCHES)},
    )


def _kept(action: ActionProfile) -> np.ndarray:
    return np.where(np.isin(action.roles, _KEPT), action.changes, 0)


def _rise(action: ActionProfile) -> int:
    """Return how far memory rises in an action above where it begins, without gradients."""
    counted = [ROLES.index(role) for role in (Role.ACTIVATIONS, Role.TEMPORARY, Role.LOSS)]
    return int(np.where(np.isin(action.roles, counted), action.changes, 0).cumsum().max(initial=0))


def _work(actions: Sequence[ActionProfile], place: int) -> tuple[Counter[Work] | Work, ...]:
    return tuple(work for action in actions if action.place == place for work in action.work)


def _pass(profile: RankProfile, phase: str, microbatch: int) -> tuple[Counter[Work] | Work, ...]:
    actions = (it for it in profile.actions if (it.phase, it.microbatch) == (phase, microbatch))
    return tuple(work for action in actions for work in action.work)


@dataclass(frozen=True)
class LayerSeconds:
    """How long parts of a model take for a microbatch.

    Attributes:
        forward_seconds: of a layer, on average.
        backward_seconds: of a layer, with recomputation.
        stage_seconds: of what each stage has besides its layers.
        once_seconds: of a layer once in a step: what FSDP2 does only in the first forward and in
            the last backward pass, besides messages.
        head_seconds: of the head and the loss, forward and backward.
    """

    forward_seconds: float
    backward_seconds: float
    stage_seconds: float
    once_seconds: float
    head_seconds: float


def layer_seconds(needs: LayerNeeds, rates: Rates) -> tuple[float, float]:
    """Return how long a layer takes for a microbatch: its forward and its backward pass."""
    forward, backward = (
        sum(map(rates.seconds_of, works)) / len(works) for works in (needs.forward_work, needs.backward_work)
    )
    return forward, backward


def head_seconds(needs: LayerNeeds, rates: Rates) -> float:
    """Return how long the head and the loss take for a microbatch, forward and backward."""
    return rates.seconds_of(needs.head_work)


def around_seconds(needs: LayerNeeds, rates: Rates) -> float:
    """Return how long all else takes for a microbatch, as a share of each layer."""
    return rates.seconds_of(needs.around_work) / len(needs.forward_work)


@dataclass(frozen=True)
class FsdpSeconds:
    """How long FSDP2 itself takes for a microbatch, besides messages: its hooks and copies.

    Attributes:
        forward_seconds: that it adds to the forward pass of a layer.
        backward_seconds: that it adds to the backward pass of a layer.
        stage_seconds: of its hooks for what belongs to no layer. This is one more unit of FSDP2 in
            each stage, and has about as many.
        once_seconds: of a layer once in a step.
    """

    forward_seconds: float
    backward_seconds: float
    stage_seconds: float
    once_seconds: float


def fsdp_seconds(sharded: LayerNeeds, alone: LayerNeeds, rates: Rates) -> FsdpSeconds:
    """Return how long FSDP2 itself takes.

    Args:
        sharded: the needs with FSDP2.
        alone: the needs that are known of the same layers.
        rates: for which messages over data axes take no time.
    """

    units = len(sharded.forward_work) + 1

    def seconds(needs: LayerNeeds, phase: str, microbatch: int) -> float:
        # Its hooks run before those that tell where a layer begins.
        return rates.seconds_of(needs.passes[phase, microbatch]) / units

    forward, backward = (seconds(sharded, phase, 1) for phase in (FORWARD, BACKWARD))
    first, last = seconds(sharded, FORWARD, 0), seconds(sharded, BACKWARD, MICROBATCHES - 1)
    hooks = Counter[Work]()
    for work in (*sharded.passes[FORWARD, 1], *sharded.passes[BACKWARD, 1]):
        if not isinstance(work, Work):
            hooks.update({kind: number for kind, number in work.items() if kind.name == HOOK})
    return FsdpSeconds(
        forward_seconds=forward - seconds(alone, FORWARD, 1),
        backward_seconds=backward - seconds(alone, BACKWARD, 1),
        stage_seconds=rates.compute_seconds(hooks) / units,
        once_seconds=max(0.0, first - forward + last - backward),
    )
