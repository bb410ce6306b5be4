"""What one layer and the head need, from simulated steps of the whole model in one stage."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshtrain.compat.schedules import BACKWARD, FORWARD
from meshtrain.planning.simulation.profile import ROLES, ActionProfile, RankProfile
from meshtrain.planning.simulation.recorder import Role, Work
from meshtrain.planning.speed.rates import Rates

_KEPT = [ROLES.index(role) for role in (Role.ACTIVATIONS, Role.LOSS)]


@dataclass(frozen=True)
class LayerNeeds:
    """What parts of a model need for a microbatch of one sequence, on one process of tp.

    Attributes:
        kept_bytes: of each layer, from its forward to its backward pass.
        head_bytes: at most, in the head and the loss.
        extra_bytes: at most besides what is kept, in the backward pass of a layer.
        forward_work: of each layer.
        backward_work: of each layer, with recomputation.
        head_work: of the rest, forward and backward.
    """

    kept_bytes: tuple[int, ...]
    head_bytes: int
    extra_bytes: int
    forward_work: tuple[tuple[Counter[Work] | Work, ...], ...]
    backward_work: tuple[tuple[Counter[Work] | Work, ...], ...]
    head_work: tuple[Counter[Work] | Work, ...]


def layer_needs(profile: RankProfile, num_layers: int) -> LayerNeeds:
    """Return what the layers of a step need, from the second of its microbatches.

    Args:
        profile: of a process that holds the whole model, with two microbatches or more.
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


def seconds_of(work: Sequence[Counter[Work] | Work], rows: int, rates: Rates) -> float:
    """Return the seconds of work for a microbatch of some sequences.

    Operations, bytes and messages grow in proportion to the sequences.
    """
    total = 0.0
    for item in work:
        if isinstance(item, Work):
            total += rates.message_seconds(item._replace(num_bytes=item.num_bytes * rows))
        else:
            scaled = {
                kind._replace(flops=kind.flops * rows, num_bytes=kind.num_bytes * rows): number
                for kind, number in item.items()
            }
            total += rates.compute_seconds(Counter(scaled))
    return total
