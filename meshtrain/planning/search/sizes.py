"""The parameters of a model, and of each of the pp ranks that share it."""

from dataclasses import dataclass
from functools import cache

from meshtrain.config.plan import PipelinePlan
from meshtrain.config.schedules import ScheduleName
from meshtrain.parallel.cut.balance import balanced_layers
from meshtrain.parallel.schedule import stage_owners
from meshtrain.planning.search.update import Held, joined, num_numbers


@dataclass(frozen=True)
class ModelSizes:
    """The parameters of a model.

    Attributes:
        layers: number of parameters of each layer, without experts.
        experts: number of parameters of the stacked experts of each layer.
        around: number of parameters before the layers, and after them.
        trained_share: of all parameters; the others are frozen.
        layer_flops: per token, of each layer.
        head_flops: per token, after the layers.
        exchanged: number of elements that travel to experts and back for a token, in a layer.
        hidden: number of elements of a hidden state of a token.
        keys: number of elements of keys and values of a token, in a layer.
        matrices: of each layer, those that the optimizer updates as a whole; empty: none.
    """

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    around: tuple[int, int]
    trained_share: float
    layer_flops: tuple[float, ...]
    head_flops: float
    exchanged: int
    hidden: int
    keys: int
    matrices: tuple[Held, ...] = ()


@dataclass(frozen=True)
class RankSizes:
    """What each pp rank holds.

    Attributes:
        layers: number of layers.
        parameters: number of parameters, without experts.
        experts: number of parameters of experts.
        around: number of parameters that belong to no layer.
        updated: matrices that are updated as a whole, and number of other parameters; equal ones
            once.
        head_rank: the one that holds the head.
    """

    layers: tuple[int, ...]
    parameters: tuple[int, ...]
    experts: tuple[int, ...]
    around: tuple[int, ...]
    updated: frozenset[tuple[Held, int]]
    head_rank: int


@cache
def rank_sizes(schedule: ScheduleName, pp: int, stages_per_rank: int, sizes: ModelSizes) -> RankSizes:
    """Return what each pp rank holds, with layers balanced among the stages."""
    owners = stage_owners(PipelinePlan(schedule=schedule, stages_per_rank=stages_per_rank), pp)
    layers, parameters, experts, begin = [0] * pp, [0] * pp, [0] * pp, 0
    matrices: list[list[Held]] = [[] for _ in range(pp)]
    for number, owner in zip(balanced_layers(sizes.layer_flops, sizes.head_flops, len(owners)), owners, strict=True):
        layers[owner] += number
        parameters[owner] += sum(sizes.layers[begin : begin + number])
        experts[owner] += sum(sizes.experts[begin : begin + number])
        matrices[owner] += sizes.matrices[begin : begin + number]
        begin += number
    around = [0] * pp
    around[owners[0]] += sizes.around[0]
    around[owners[-1]] += sizes.around[1]
    parameters = [own + others for own, others in zip(parameters, around, strict=True)]
    held = [joined(of_rank) for of_rank in matrices]
    updated = frozenset(
        (own, others + of_experts - num_numbers(own))
        for own, others, of_experts in zip(held, parameters, experts, strict=True)
    )
    return RankSizes(tuple(layers), tuple(parameters), tuple(experts), tuple(around), updated, owners[-1])
