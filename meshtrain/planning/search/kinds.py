"""What the layers of each kind of candidates need, from simulations."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch
from transformers import PretrainedConfig

from meshtrain.config.plan import TensorPlan
from meshtrain.errors import UserError
from meshtrain.models.copying import copy_module
from meshtrain.models.flops import flops_of_layers
from meshtrain.models.fused import unfuse
from meshtrain.parallel.account import flops_around_layers
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.parallel.experts.stacks import expert_stacks
from meshtrain.parallel.matrices import matrices_of
from meshtrain.parallel.tensor.head_share import heads_of
from meshtrain.planning.assembly.outline import outline_of
from meshtrain.planning.assembly.task import Task
from meshtrain.planning.cores import on_all_cores
from meshtrain.planning.search.candidates import Kind
from meshtrain.planning.search.estimate import MORE_ROWS, Estimator
from meshtrain.planning.search.layers import LayerNeeds, layer_needs
from meshtrain.planning.search.sizes import ModelSizes
from meshtrain.planning.search.update import Held, Matrices, joined, touched_bytes
from meshtrain.planning.search.wanted import Wanted
from meshtrain.planning.simulation.fewer_layers import LayersNeededError
from meshtrain.planning.simulation.profile import RankProfile
from meshtrain.planning.simulation.rank import simulate_rank
from meshtrain.planning.simulation.run import SimulatedRun
from meshtrain.training.resolve import ResolvedRun


def build_estimator(wanted: Wanted, kinds: Collection[Kind]) -> Estimator:
    """Return an estimator that knows the layers of some kinds of candidates.

    Args:
        wanted: the run. It then knows the tensor rules of these kinds.
        kinds: tp, sequence parallel and recomputation. Those that the model refuses are left out.
            Without sequence parallelism more memory is needed for the same seconds, so that is left
            out where the model allows it.

    Raises:
        UserError: if the model refuses all of them.
    """
    degrees = sorted({tp for tp, _, _ in kinds})
    sizes, speed = _model_sizes(wanted.base), wanted.machine.config.speed
    assert speed is not None
    needs: dict[tuple[Kind, int], LayerNeeds] = {}
    refusals: list[UserError] = []
    for found in on_all_cores(_needs_of_kinds, degrees, wanted, kinds, len(sizes.layers)):
        needs |= found.needs
        wanted.tensors.update(found.tensors)
        refusals += found.refusals
    if not needs:
        raise refusals[0]
    batch = replace(wanted.base.batch, global_batch_size=wanted.config.global_batch_size)
    parameters: torch.dtype = getattr(torch, wanted.base.plan.precision.parameters)
    touched = touched_bytes(wanted.config.optimizer, parameters)
    return Estimator(wanted.base.plan, wanted.config.kept_bytes, touched, batch, sizes, needs, speed)


@dataclass
class _Found:
    """What was found out about kinds of layers.

    Attributes:
        needs: kind and sequences of a microbatch -> what the layers need.
        tensors: tp and sequence parallel -> the tensor rules.
        refusals: why other kinds contradict the model.
    """

    needs: dict[tuple[Kind, int], LayerNeeds] = field(default_factory=dict)
    tensors: dict[tuple[int, bool], TensorPlan] = field(default_factory=dict)
    refusals: list[UserError] = field(default_factory=list)


def _needs_of_kinds(tp: int, wanted: Wanted, kinds: Collection[Kind], num_layers: int) -> _Found:
    found = _Found()
    # Without recomputation, less of the work of a layer is that of the parameters alone.
    for kind in sorted((it for it in kinds if it[0] == tp), key=lambda it: (not it[1], it[2] != "none")):
        if ((tp, True, kind[2]), 1) in found.needs:
            continue
        is_first = not any(known[:2] == kind[:2] for known, _ in found.needs)
        needs = {}
        for rows in (1, MORE_ROWS) if is_first else (1,):
            answer = _needs(wanted, kind, rows, num_layers)
            if isinstance(answer, UserError):
                found.refusals.append(answer)
                break
            needs[kind, rows] = answer
        else:
            found.needs |= needs
    found.tensors = wanted.tensors
    return found


def _needs(wanted: Wanted, kind: Kind, rows: int, num_layers: int) -> LayerNeeds | UserError:
    """Return what layers need, or what contradicts the model."""
    alone, candidate = wanted.of_layers(kind, rows)
    return alone.attempted(candidate, lambda: layer_needs(_passes(alone.simulated(candidate)), num_layers))


def _passes(run: SimulatedRun) -> RankProfile:
    """Return the passes of a run on one stage."""
    try:
        outline = outline_of(run, all_layers=False)
        return Task(0, run, outline.stages, (0,)).simulate_passes()
    except LayersNeededError:
        return simulate_rank(run, 0)


def _model_sizes(base: ResolvedRun) -> ModelSizes:
    """Return the sizes of a model."""
    name, layers = find_layers(base.model)
    before, after = flops_around_layers(base.model)
    first, *others = flops_of_layers(layers, base.model.config, base.batch.sequence_length)
    around = [0, 0]
    stacked = [
        sum(parameter.numel() for stack in expert_stacks(layer).values() for parameter in stack.parameters())
        for layer in layers
    ]
    head = {id(parameter) for parameter in base.model.get_output_embeddings().parameters()}
    for parameter_name, parameter in base.model.named_parameters(remove_duplicate=False):
        if not parameter_name.startswith(f"{name}."):
            around[id(parameter) in head and "embed" not in parameter_name] += parameter.numel()
    heads = heads_of(base.model.config)
    hidden = next(base.model.get_input_embeddings().parameters()).shape[-1]
    return ModelSizes(
        layers=tuple(
            sum(parameter.numel() for parameter in layer.parameters()) - experts
            for layer, experts in zip(layers, stacked, strict=True)
        ),
        experts=tuple(stacked),
        trained_share=base.model.num_parameters(only_trainable=True) / base.model.num_parameters(),
        around=(around[0], around[1]),
        layer_flops=(before + first, *others),
        head_flops=after,
        exchanged=hidden * _num_choices(base.model.config.get_text_config()),
        keys=2 * hidden if heads is None else 2 * hidden * heads.keys // heads.queries,
        matrices=_matrices(base) if base.config.optimizer.takes_whole_matrices else (),
    )


def _matrices(base: ResolvedRun) -> tuple[Held, ...]:
    """Return the matrices of each layer that the optimizer updates as a whole."""
    model = copy_module(base.model, {})
    unfuse(model, base.plan.tensor.fused)
    _, layers = find_layers(model)
    return tuple(
        joined(
            ((Matrices((rows, columns), of_experts=bool(stack)), math.prod(stack)),)
            for *stack, rows, columns in (it.shape for it in matrices_of(layer) if it.requires_grad)
        )
        for layer in layers
    )


def _num_choices(config: PretrainedConfig) -> int:
    """Return how many experts a token goes to, at most; 1 if the configuration does not say it."""
    found = getattr(config, "num_experts_per_tok", None)
    return max(found) if isinstance(found, list) else found or 1
