"""What one layer and the head need, from simulated steps of the whole model in one stage."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshtrain.compat.schedules import BACKWARD, FORWARD
from meshtrain.planning.simulation.profile import ROLES, ActionProfile, RankProfile
from meshtrain.planning.simulation.recorder import Role, Work
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
        last_work: the same in the last microbatch, where FSDP2 reduces gradients.
        head_work: of the rest, forward and backward.
    """

    kept_bytes: tuple[int, ...]
    head_bytes: int
    extra_bytes: int
    forward_work: tuple[tuple[Counter[Work] | Work, ...], ...]
    backward_work: tuple[tuple[Counter[Work] | Work, ...], ...]
    last_work: tuple[tuple[Counter[Work] | Work, ...], ...]
    head_work: tuple[Counter[Work] | Work, ...]


def layer_needs(profile: RankProfile, num_layers: int) -> LayerNeeds:
    """Return what the layers of a step need, from the second of its microbatches and the last one.

    Args:
        profile: of a process that holds the whole model, with three microbatches.
        num_layers: of the model.
    """
    last = [action for action in profile.actions if action.microbatch == MICROBATCHES - 1 and action.phase == BACKWARD]
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
        last_work=tuple(_work(last, it) for it in layers),
        head_work=tuple(work for action in rest for work in action.work),
    )


def _kept(action: ActionProfile) -> np.ndarray:
    return np.where(np.isin(action.roles, _KEPT), action.changes, 0)


def _rise(action: ActionProfile) -> int:
    """Return how far memory rises in an action above where it begins, without gradients."""
    counted = [ROLES.index(role) for role in (Role.ACTIVATIONS, Role.TEMPORARY, Role.LOSS)]
    return int(np.where(np.isin(action.roles, counted), action.changes, 0).cumsum().max(initial=0))


def _work(actions: Sequence[ActionProfile], place: int) -> tuple[Counter[Work] | Work, ...]:
    return tuple(work for action in actions if action.place == place for work in action.work)


@dataclass(frozen=True)
class LayerSeconds:
    """How long parts of a model take for a microbatch.

    Attributes:
        forward_seconds: of a layer, on average.
        backward_seconds: of a layer, with recomputation.
        reducing_seconds: of a layer once in a step, besides messages.
        head_seconds: of the rest, forward and backward.
    """

    forward_seconds: float
    backward_seconds: float
    reducing_seconds: float
    head_seconds: float


def layer_seconds(needs: LayerNeeds, rates: Rates) -> LayerSeconds:
    """Return how long the layers and the head take for a microbatch."""
    forward, backward, last = (
        sum(_seconds(work, rates) for work in works) / len(works)
        for works in (needs.forward_work, needs.backward_work, needs.last_work)
    )
    return LayerSeconds(forward, backward, max(0.0, last - backward), _seconds(needs.head_work, rates))


def _seconds(work: Sequence[Counter[Work] | Work], rates: Rates) -> float:
    return sum(rates.message_seconds(item) if isinstance(item, Work) else rates.compute_seconds(item) for item in work)
