"""What the stages of a run consist of, without a simulation."""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from meshtrain.config.lora import LoraConfig
from meshtrain.config.plan import ParallelPlan, PrecisionPlan, TensorPlan
from meshtrain.config.schedules import SCHEDULES
from meshtrain.errors import ModelError
from meshtrain.models.adapters import unfuse_adapters
from meshtrain.models.fused import unfuse
from meshtrain.parallel.account import Message
from meshtrain.parallel.cut.borders import StageRoutes, Stages
from meshtrain.parallel.cut.probe import Structure
from meshtrain.parallel.experts.stacks import expert_parameters
from meshtrain.parallel.tensor.adapters import dims_of_adapters
from meshtrain.parallel.tensor.head_share import Heads, uneven_heads
from meshtrain.parallel.tensor.rules import resolve_rules
from meshtrain.planning.assembly.layers import NEAREST, fewest_layers, likes
from meshtrain.planning.assembly.processes import Shape
from meshtrain.planning.simulation.fewer_layers import LayersNeededError, stream_problem
from meshtrain.planning.simulation.models import (
    borders_of,
    build_run_model,
    full_model,
    layer_kinds,
    layer_parameters,
    messages_of,
    run_adapters,
)
from meshtrain.planning.simulation.run import SimulatedRun

# The settings of a plan that name modules.
RULES = ("styles", "fused", "local_attributes", "local_inputs")
# The number of a layer in a pattern. Behind `*`, which stands for a layer, it is that of an expert.
_NUMBER = re.compile(r"([^*]*?\.)(\d+)(\..*)?")


@dataclass(frozen=True)
class StageOutline:
    """What a stage consists of.

    Attributes:
        layers: indices of its layers in the model.
        kept: those of them that show what all of them do.
        likes: for each layer, the position in `kept` of one that does the same.
        parameters: of each layer.
        shapes: of its parameters.
        kind: equal for stages that compute the same.
    """

    layers: tuple[int, ...]
    kept: tuple[int, ...]
    likes: tuple[int, ...]
    parameters: tuple[Hashable, ...]
    shapes: frozenset[Shape]
    kind: tuple[Hashable, ...]

    @property
    def left_out(self) -> list[int]:
        """Return the layers that are not kept."""
        return sorted({*self.layers} - {*self.kept})

    def like(self, layer: int) -> int:
        """Return the position in `kept` of a layer that does the same as one of the model."""
        return self.likes[layer - self.layers[0]]

    def parameters_of(self, layer: int) -> Hashable:
        """Return a value that is equal for layers with like parameters."""
        return self.parameters[layer - self.layers[0]]


@dataclass(frozen=True)
class Outline:
    """What a run consists of.

    Attributes:
        stages: of the pipeline.
        is_stream: whether a stage gets from others only what each layer passes on to the next.
        heads: of attention, if tp does not divide their numbers.
        borders_are_alike: whether the same messages cross all borders of stages, in both
            directions.
    """

    stages: tuple[StageOutline, ...]
    is_stream: bool
    heads: Heads | None
    borders_are_alike: bool


def outline_of(run: SimulatedRun, *, all_layers: bool) -> Outline:
    """Return the outline of a run.

    Args:
        run: whose plan is resolved.
        all_layers: whether all layers are kept.

    Raises:
        LayersNeededError: if the layers of the model must not be left out, and some were.
    """
    is_named = _names_layers(run.lora)
    if not all_layers and is_named:
        raise LayersNeededError("`lora` names a layer by its number")
    full = full_model(run)
    parameters = layer_parameters(full)
    precision, every = run.plan.precision, run.plan.recompute.every
    kinds = [
        (kind, index % every, _skipped_in_float8(precision, index), is_named and index)
        for index, kind in enumerate(layer_kinds(full))
    ]
    stages = _layers_of_stages(run)
    # Such a schedule computes the gradients of all weights of a stage in one pass.
    all_layers = all_layers or SCHEDULES[run.plan.pipeline.schedule].splits_backward
    ahead = run.plan.shard.prefetch
    reach = NEAREST if ahead == "implicit" else NEAREST.gathering(ahead)
    kept = [
        layers if all_layers else tuple(layers[0] + at for at in fewest_layers([kinds[it] for it in layers], reach))
        for layers in stages
    ]
    model = build_run_model(replace(run, layers=tuple(layer for layers in kept for layer in layers)))
    adapters = run_adapters(run, model)
    unfuse_adapters(adapters, model, unfuse(model, run.plan.tensor.fused))
    few = with_layers(run, kept)
    structure, routes = _borders(few, leaves_out=stages != kept)
    shapes = _shapes(model, adapters, few.plan, structure)
    problem = None if structure is None else stream_problem(structure.trace)
    if problem is not None and stages != kept:
        raise LayersNeededError(problem)
    borders = [_border(index, len(stages), structure, route) for index, route in enumerate(routes)]
    outlines = tuple(
        StageOutline(
            layers,
            few,
            tuple(likes([kinds[it] for it in layers], [it - layers[0] for it in few], reach)) if layers else (),
            tuple(parameters[it] for it in layers),
            shape,
            (*border, *(kinds[it] for it in layers)),
        )
        for layers, few, shape, border in zip(stages, kept, shapes, borders, strict=True)
    )
    heads = uneven_heads(model.config, run.plan.mesh.tp)
    return Outline(outlines, structure is not None and problem is None, heads, _are_alike(messages_of(few)))


def with_layers(run: SimulatedRun, stages: Sequence[Sequence[int]]) -> SimulatedRun:
    """Return a run with some layers of the model only.

    Args:
        stages: indices of the layers of each stage.
    """
    kept = tuple(layer for layers in stages for layer in layers)
    pipeline = run.plan.pipeline.model_copy(update={"layers_per_stage": [len(layers) for layers in stages]})
    update = {"pipeline": pipeline, "tensor": _rules_of_layers(run.plan.tensor, kept)}
    plan = run.plan.model_copy(update={**update, "precision": _precision_of_layers(run.plan.precision, kept)})
    return replace(run, plan=plan, layers=kept)


def _rules_of_layers(plan: TensorPlan, kept: Sequence[int]) -> TensorPlan:
    """Return the rules of a plan with the numbers that the kept layers have then."""
    return plan.model_copy(update={name: _renumbered(getattr(plan, name), kept) for name in RULES})


def _precision_of_layers(plan: PrecisionPlan, kept: Sequence[int]) -> PrecisionPlan:
    if plan.compute != "float8":
        return plan
    skip = [*_renumbered(dict.fromkeys(plan.float8.skip or ()), kept)]
    return plan.model_copy(update={"float8": plan.float8.model_copy(update={"skip": skip})})


def _renumbered(rules: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    positions = {str(index): position for position, index in enumerate(kept)}
    found = {}
    for pattern, rule in rules.items():
        numbered = _NUMBER.fullmatch(pattern)
        if numbered is None:
            found[pattern] = rule
        elif numbered[2] in positions:
            found[f"{numbered[1]}{positions[numbered[2]]}{numbered[3] or ''}"] = rule
    return found


def _layers_of_stages(run: SimulatedRun) -> list[tuple[int, ...]]:
    ends = accumulate(run.plan.pipeline.layer_counts, initial=0)
    return [tuple(range(first, end)) for first, end in pairwise(ends)]


def _skipped_in_float8(plan: PrecisionPlan, layer: int) -> tuple[str, ...]:
    """Return the modules of one layer that a plan names, to leave them out of float8."""
    numbered = [found for pattern in plan.float8.skip or () if (found := _NUMBER.fullmatch(pattern))]
    return tuple(found[3] or "" for found in numbered if found[2] == str(layer))


def _borders(few: SimulatedRun, *, leaves_out: bool) -> tuple[Structure | None, list[StageRoutes]]:
    """Return the structure of the model of a run and the routes of its stages.

    The structure of a model in one piece is needed only if layers are left out.
    """
    if len(few.plan.pipeline.layer_counts) == 1 and not leaves_out:
        return None, [StageRoutes()]
    try:
        return borders_of(few)
    except ModelError as error:
        if leaves_out:
            raise LayersNeededError(f"its passes are not known: {error}") from error
        raise


def _are_alike(messages: Sequence[Message]) -> bool:
    """Return whether the same messages cross all borders, in both directions."""
    borders: dict[int, list[tuple[int, ...]]] = {}
    for it in messages:
        borders.setdefault(it.stage, []).append((it.num_bytes, *it.shape))
    return all(it.has_gradient for it in messages) and len({*map(tuple, borders.values())}) == 1


def _border(index: int, num_stages: int, structure: Structure | None, route: StageRoutes) -> tuple[Hashable, ...]:
    """Return what a stage has besides its layers."""
    calls = [] if structure is None else [structure.trace.calls[number] for number in sorted(route.own)]
    parts = [call.name for call in calls if call.layer is None]
    return index == 0, index == num_stages - 1, len(route.received), *parts


def _names_layers(lora: LoraConfig) -> bool:
    """Return whether adapters name layers by their numbers, which all layers must keep then."""
    targets = lora.target_modules if isinstance(lora.target_modules, list) else []
    return any(part.isdigit() for target in (*targets, *lora.modules_to_save) for part in target.split("."))


def _shapes(
    model: PreTrainedModel, adapters: Mapping[str, nn.Module], plan: ParallelPlan, structure: Structure | None
) -> list[frozenset[Shape]]:
    """Return the shapes of the parameters of each stage."""
    dims = {}
    if plan.mesh.tp > 1:
        rules = resolve_rules(model, plan.tensor)
        dims = {**rules.sharded_dims, **dims_of_adapters(model, adapters, rules)}
    numbers = plan.pipeline.layer_counts
    of_experts = expert_parameters(model)
    stages = None if structure is None else Stages(structure.trace, numbers, structure.layers_name)
    found: list[set[Shape]] = [set() for _ in numbers]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        index = 0 if stages is None else stages.of_parameter(name)
        found[index].add(Shape(tuple(parameter.shape), dims.get(name), name in of_experts))
    for base, layer in adapters.items():
        index = 0 if stages is None else stages.of_parameter(f"{base}.weight")
        for kind, parameter in layer.named_parameters():
            found[index].add(Shape(tuple(parameter.shape), dims.get(f"{base}.{kind}")))
    return [*map(frozenset, found)]
