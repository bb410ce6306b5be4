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
from meshtrain.planning.search.candidates import Candidate, Cut, HeadKind, Kind, Reshard, needs_sharded
from meshtrain.planning.search.estimate import Estimator
from meshtrain.planning.search.layers import LayerNeeds, layer_needs
from meshtrain.planning.search.parts import MORE_ROWS, Parts, Simulated
from meshtrain.planning.search.sizes import ModelSizes
from meshtrain.planning.search.update import Held, Matrices, joined, touched_bytes
from meshtrain.planning.search.wanted import Wanted
from meshtrain.planning.simulation.fewer_layers import LayersNeededError
from meshtrain.planning.simulation.profile import RankProfile
from meshtrain.planning.simulation.rank import simulate_rank
from meshtrain.planning.simulation.run import SimulatedRun
from meshtrain.training.resolve import ResolvedRun


def build_estimator(wanted: Wanted, candidates: Collection[Candidate]) -> Estimator:
    """Return an estimator that knows the layers and the heads of some candidates.

    Args:
        wanted: the run. It then knows the tensor rules of these candidates.
        candidates: for the run. Kinds of layers and heads that the model refuses are left out.
            Without sequence parallelism more memory is needed for the same seconds, so that is left
            out where the model allows it.

    Raises:
        UserError: if the model refuses all of them.
    """
    degrees = sorted({it.tp for it in candidates})
    sizes, speed = _model_sizes(wanted.base), wanted.machine.config.speed
    assert speed is not None
    simulated, refusals = Simulated(), list[UserError]()
    for found in on_all_cores(_of_tp, degrees, wanted, candidates, len(sizes.layers)):
        simulated.add(found.simulated)
        wanted.tensors.update(found.tensors)
        refusals += found.refusals
    batch = replace(wanted.base.batch, global_batch_size=wanted.config.global_batch_size)
    parameters: torch.dtype = getattr(torch, wanted.base.plan.precision.parameters)
    touched = touched_bytes(wanted.config.optimizer, parameters)
    kept, chunks = wanted.config.kept_bytes, wanted.tokens_at_once
    estimator = Estimator(wanted.base.plan, kept, touched, batch, sizes, Parts(simulated, speed), chunks, speed)
    if not any(map(estimator.knows, candidates)):
        raise refusals[0]
    return estimator


@dataclass
class _Found:
    """What was found out about kinds of layers and of heads.

    Attributes:
        simulated: microbatches.
        tensors: kind of heads -> the tensor rules.
        refusals: why other kinds contradict the model.
    """

    simulated: Simulated = field(default_factory=Simulated)
    tensors: dict[HeadKind, TensorPlan] = field(default_factory=dict)
    refusals: list[UserError] = field(default_factory=list)


def _of_tp(tp: int, wanted: Wanted, candidates: Collection[Candidate], num_layers: int) -> _Found:
    ours = [it for it in candidates if it.tp == tp]
    head_kinds = sorted({it.head_kind for it in ours}, key=lambda it: not it.loss_parallel)
    reshards = {it.reshard for it in ours if needs_sharded(it, wanted.base.plan)}
    found = _Found()
    # Without recomputation, less of the work of a layer is that of the parameters alone.
    for kind in sorted({it.kind for it in ours}, key=lambda it: (not it.cut.sequence_parallel, it.recompute != "none")):
        if (kind._replace(cut=Cut(tp, sequence_parallel=True)), 1) in found.simulated.layers:
            continue
        heads = [it for it in head_kinds if it.cut == kind.cut]
        known = [it for it in heads if (it, 1) in found.simulated.heads]
        if known:
            _add(found, wanted, kind, known[0], (1,), num_layers)
            continue
        for head in heads:
            # How much grows with the sequences is known from the first head.
            numbers = (1,) if (kind, 1) in found.simulated.layers else (1, MORE_ROWS)
            _add(found, wanted, kind, head, numbers, num_layers)
        if (kind, 1) in found.simulated.layers:
            for reshard in reshards:
                _add_sharded(found, wanted, kind, reshard, num_layers)
    found.tensors = wanted.tensors
    return found


def _add(found: _Found, wanted: Wanted, kind: Kind, head: HeadKind, numbers: Collection[int], num_layers: int) -> None:
    """Add what layers and a head need for some numbers of sequences, or the contradiction."""
    needs = {}
    for rows in numbers:
        answer = _layer_needs(*wanted.of_layers(kind, rows, loss_parallel=head.loss_parallel), num_layers)
        if isinstance(answer, UserError):
            found.refusals.append(answer)
            return
        needs[rows] = answer
    for rows, answer in needs.items():
        found.simulated.layers.setdefault((kind, rows), answer)
        found.simulated.heads.setdefault((head, rows), answer)


def _add_sharded(found: _Found, wanted: Wanted, kind: Kind, reshard: Reshard, num_layers: int) -> None:
    """Add what layers need with parameters that FSDP2 shards."""
    head = next(head for head, _ in found.simulated.heads if head.cut == kind.cut)
    alone, candidate = wanted.of_layers(kind, 1, loss_parallel=head.loss_parallel, shards=2)
    answer = _layer_needs(alone, replace(candidate, reshard=reshard), num_layers)
    if isinstance(answer, UserError):
        found.refusals.append(answer)
    else:
        found.simulated.sharded[kind, reshard] = answer


def _layer_needs(alone: Wanted, candidate: Candidate, num_layers: int) -> LayerNeeds | UserError:
    """Return what layers need, or what contradicts the model."""
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
        hidden=hidden,
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
