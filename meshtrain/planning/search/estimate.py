"""Memory and seconds of a candidate in closed form.

The numbers of a layer come from simulated steps. A test compares the results with full simulations.
They choose which candidates are simulated, and say why others lose.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import mean

import torch

from meshtrain.compat.schedules import BACKWARD, FORWARD, WEIGHTS, pass_orders
from meshtrain.config.machine import SpeedConfig
from meshtrain.config.mesh import AXES, CP, DP_REPLICATE, EP, EXPERT_FSDP_AXES, PP, MeshPlan, fsdp_axis_of
from meshtrain.config.plan import ParallelPlan, PipelinePlan
from meshtrain.config.schedules import SCHEDULES, ScheduleName
from meshtrain.parallel.check import BatchShape
from meshtrain.parallel.schedule import stage_owners
from meshtrain.parallel.shard import has_formats
from meshtrain.planning.search.candidates import Candidate, HeadKind, needs_sharded
from meshtrain.planning.search.layers import LayerSeconds
from meshtrain.planning.search.parts import Parts
from meshtrain.planning.search.sizes import ModelSizes, RankSizes, rank_sizes
from meshtrain.planning.search.update import LARGE, Held, update_seconds
from meshtrain.planning.simulation.recorder import Work
from meshtrain.planning.speed.rates import GB, Rates

# Rounds of microbatches after which no more activations are held at once, and the schedules that
# hold those of all microbatches.
ROUNDS = 2
ALL_AT_ONCE = ("GPipe", "LoopedBFS")
# Between its two parts, a backward pass keeps gradients too.
SPLIT = 1.3


@dataclass(frozen=True)
class Estimate:
    """What a candidate needs.

    Attributes:
        seconds: of a step.
    """

    seconds: float
    _peak_bytes: Callable[[], float]

    @cached_property
    def peak_bytes(self) -> float:
        """Return the memory of the fullest process. Most candidates are too slow to ask for it."""
        return self._peak_bytes()


class Estimator:
    """Estimates candidates of one run.

    Args:
        plan: of the run, for its number formats.
        kept: bytes of a number of a parameter, shape of a part of it, shape of the parameter, and
            whether it belongs to a matrix of the layers -> bytes that the run keeps for the part
            between steps, besides it.
        touched: as `touched_bytes` returns it.
        batch: shape of the batches.
        sizes: of the model.
        parts: the layers and heads.
        chunk_tokens: kind of heads, sequences of a microbatch and cp -> number of tokens for which
            a process has logits at once.
        speed: of the machine.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        kept: Callable[..., int],
        touched: float,
        batch: BatchShape,
        sizes: ModelSizes,
        parts: Parts,
        chunk_tokens: Callable[[HeadKind, int, int], int],
        speed: SpeedConfig,
    ) -> None:
        self._plan, self._sizes, self._parts = plan, sizes, parts
        self._split_parts = parts.of_split_schedules()
        self._batch, self._length = batch.global_batch_size, batch.rows * batch.sequence_length
        self._speed, self._touched, self._chunk_tokens = speed, touched, cache(chunk_tokens)
        formats = plan.precision.parameters, plan.precision.activations, plan.precision.reduce
        self._parameter, self._compute, self._reduce = (getattr(torch, name).itemsize for name in formats)
        self._parameters: torch.dtype = getattr(torch, plan.precision.parameters)
        self._kept = tuple(kept(self._parameter, LARGE, LARGE, of_matrix=it) / math.prod(LARGE) for it in (False, True))
        self._has_formats = has_formats(plan)
        self._rates = cache(self._mesh_rates)
        self._messages = cache(self._message_seconds)
        self._matrices = cache(self._matrix_seconds)

    def knows(self, candidate: Candidate) -> bool:
        """Return whether the layers and the head of a candidate were simulated."""
        return self._parts.knows(candidate, is_sharded=needs_sharded(candidate, self._plan))

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return what a candidate needs."""
        shape = rank_sizes(candidate.schedule, candidate.pp, candidate.stages_per_rank, self._sizes)
        number = self._batch // (candidate.data_degree * candidate.micro_batch_size)
        return Estimate(
            self._seconds(candidate, shape, number),
            # The first one keeps most activations, and the one with the head has the loss.
            lambda: max(self._bytes(candidate, shape, rank, number) for rank in {0, candidate.pp - 1, shape.head_rank}),
        )

    def _bytes(self, candidate: Candidate, shape: RankSizes, rank: int, number: int) -> float:
        whole = (shape.parameters[rank] + shape.experts[rank] / candidate.ep) / candidate.tp
        shard = self._shard(candidate, shape.parameters[rank] + shape.experts[rank])
        # Nearly all parameters of layers are matrices.
        around = self._shard(candidate, shape.around[rank])
        kept = around * self._kept[False] + (shard - around) * self._kept[True]
        trained = self._sizes.trained_share
        state = 0.0 if candidate.offload == "cpu" else shard * self._parameter + trained * kept
        if self._uses_fsdp(candidate):
            largest = self._largest_layer(candidate)
            layer = largest * self._compute
            gathered = whole * self._compute if candidate.reshard == "never" else 3 * layer
            is_whole = (number > 1 or candidate.pp > 1) and not self._plan.shard.reduces_each_microbatch
            gradients = trained * (whole * self._reduce if is_whole else shard * self._parameter)
            # The buffers of a gather and of a reduction.
            gathered += layer + largest * self._reduce
        else:
            gathered, gradients = 0.0, trained * shard * self._parameter
        kept = mean(self._parts.kept_bytes(candidate.kind))
        chunks = self._chunks(candidate, number)[rank]
        activations = chunks * kept * shape.layers[rank] / candidate.stages_per_rank
        if candidate.pp > 1 and SCHEDULES[candidate.schedule].splits_backward:
            activations *= SPLIT
        head = self._head_bytes(candidate) if rank == shape.head_rank else 0.0
        extra = self._parts.extra_bytes(candidate.kind, candidate.micro_batch_size)
        passing = max(extra / candidate.cp, head)
        activations *= candidate.micro_batch_size
        return state + gathered + gradients + activations / candidate.cp + passing

    def _uses_fsdp(self, candidate: Candidate) -> bool:
        return candidate.sharding_degree > 1 or self._has_formats or candidate.offload == "cpu"

    def _shard(self, candidate: Candidate, parameters: float) -> float:
        """Return how many of some parameters a process holds, experts or others."""
        return parameters / candidate.tp / candidate.sharding_degree

    def _largest_layer(self, candidate: Candidate) -> float:
        """Return the number of parameters of a layer on a process, while they are gathered."""
        sizes = zip(self._sizes.layers, self._sizes.experts, strict=True)
        return max(others + experts / candidate.ep for others, experts in sizes) / candidate.tp

    def _head_bytes(self, candidate: Candidate) -> float:
        """Return the bytes that the head and the loss need on a process.

        Logits exist for a chunk, hidden states and their gradients for all tokens.
        """
        kind, rows, cp = candidate.head_kind, candidate.micro_batch_size, candidate.cp
        one, tokens = self._chunk_tokens(kind, 1, 1), rows * self._length // cp
        at_once = self._chunk_tokens(kind, rows, cp)
        per_hidden = 2 * self._sizes.hidden * self._compute
        simulated: float = self._parts.head_bytes(kind)
        if one < self._length:
            simulated -= self._length * per_hidden
        return simulated / one * at_once + (tokens * per_hidden if at_once < tokens else 0)

    def _chunks(self, candidate: Candidate, number: int) -> list[int]:
        if candidate.pp == 1:
            return [1]
        if candidate.schedule in ALL_AT_ONCE:
            return [number * candidate.stages_per_rank] * candidate.pp
        # In whole rounds. Every schedule takes these numbers.
        rounds = min(number // candidate.pp, ROUNDS)
        return _live_chunks(candidate.schedule, candidate.pp, candidate.stages_per_rank, rounds * candidate.pp)

    def _seconds(self, candidate: Candidate, shape: RankSizes, number: int) -> float:
        parts = self._parts_of(candidate)
        busy = max(
            shape.layers[rank] * (parts.forward_seconds + parts.backward_seconds)
            + (parts.head_seconds if rank == shape.head_rank else 0.0)
            for rank in range(candidate.pp)
        )
        busy += candidate.stages_per_rank * parts.stage_seconds
        total = number * busy + max(shape.layers) * parts.once_seconds + self._bubble(candidate, busy, number)
        exposed = self._gather_seconds(candidate, number, parts.forward_seconds, parts.backward_seconds)
        exposed += self._replica_seconds(candidate, parts.backward_seconds)
        update = max(self._update_seconds(candidate, *updated) for updated in shape.updated)
        return total + exposed + update + self._border_seconds(candidate)

    def _parts_of(self, candidate: Candidate) -> LayerSeconds:
        """Return the seconds of parts for a microbatch, with the messages of ep and cp."""
        reshard = candidate.reshard if needs_sharded(candidate, self._plan) else None
        rows, cp = candidate.micro_batch_size, candidate.cp
        is_split = candidate.pp > 1 and SCHEDULES[candidate.schedule].splits_backward
        of_schedule = self._split_parts if is_split else self._parts
        parts = of_schedule.seconds(candidate.kind, candidate.head_kind, rows, cp, reshard)
        if candidate.ep == cp == 1:
            return parts
        messages = self._exchange_seconds(candidate)
        again = 2 if candidate.recompute == "full" else 1
        return replace(
            parts,
            forward_seconds=parts.forward_seconds + messages,
            backward_seconds=parts.backward_seconds + again * messages,
        )

    def _exchange_seconds(self, candidate: Candidate) -> float:
        """Return the seconds of the messages of ep and cp in a layer and a pass."""
        tokens = candidate.micro_batch_size * self._length
        where, sizes, seconds = (candidate.mesh, candidate.offload), self._sizes, 0.0
        if candidate.ep > 1:
            # To the experts and back. A part of the rows stays.
            rows = tokens * sizes.exchanged // candidate.cp * (candidate.ep - 1) // candidate.ep
            seconds += 2 * self._messages(*where, "all_to_all", rows * self._compute, EP)
        if candidate.cp > 1:
            gathered = tokens * sizes.keys // candidate.tp * self._compute
            seconds += self._messages(*where, "all_gather", gathered, CP)
        return seconds

    def _mesh_rates(self, mesh: tuple[int, ...], offload: str) -> Rates:
        plan = MeshPlan(**dict(zip(AXES, mesh, strict=True)))
        return Rates(self._speed, plan, optimizer_on_host=offload == "cpu")

    def _message_seconds(
        self, mesh: tuple[int, ...], offload: str, name: str, num_bytes: int, axis: str, *, is_posted: bool = False
    ) -> float:
        message = Work(name, None, 0, num_bytes, axis)
        return self._rates(mesh, offload).message_seconds(message, is_posted=is_posted)

    def _matrix_seconds(self, matrices: Held, mesh: tuple[int, ...], offload: str) -> float:
        return update_seconds(matrices, mesh, self._parameters, self._rates(mesh, offload))

    def _bubble(self, candidate: Candidate, busy: float, number: int) -> float:
        """Return the seconds in which a process waits for the first and the last microbatches."""
        if candidate.pp == 1:
            return 0.0
        share = 1 / candidate.stages_per_rank
        if SCHEDULES[candidate.schedule].splits_backward:
            share /= 2
        return (candidate.pp - 1) * busy * share

    def _gather_seconds(self, candidate: Candidate, number: int, forward: float, backward: float) -> float:
        """Return the seconds of FSDP2's messages that nothing hides."""
        if candidate.sharding_degree == 1:
            return 0.0
        sizes = self._sizes
        gather = self._fsdp_message(candidate, "all_gather", self._compute)
        reduce = self._fsdp_message(candidate, "reduce_scatter", self._reduce)
        layers = len(sizes.layers) / candidate.pp
        # Which passes gather, and how often.
        passes, times = ((forward, backward), number) if candidate.reshard == "always" else ((forward,), 1)
        reductions = number if self._plan.shard.reduces_each_microbatch else 1
        if not self._speed.is_asynchronous:
            return layers * (times * len(passes) * gather + reductions * reduce)
        # Nothing hides the gather of the first layer of a pass.
        first = candidate.stages_per_rank * len(passes) * gather
        later = layers * sum(max(0.0, gather - seconds) for seconds in passes)
        return times * (first + later) + reductions * layers * max(0.0, reduce - backward)

    def _fsdp_message(self, candidate: Candidate, name: str, itemsize: int) -> float:
        """Return the seconds of FSDP2's message for the largest layer, and that for its experts."""
        degrees, tp = dict(zip(AXES, candidate.mesh, strict=True)), candidate.tp
        sizes = {fsdp_axis_of(degrees): self._largest_layer(candidate)}
        if candidate.ep > 1:
            sizes = {
                fsdp_axis_of(degrees): max(self._sizes.layers) / tp,
                fsdp_axis_of(degrees, EXPERT_FSDP_AXES): max(self._sizes.experts) / tp / candidate.ep,
            }
        return sum(
            self._messages(candidate.mesh, candidate.offload, name, int(size * itemsize), axis)
            for axis, size in sizes.items()
        )

    def _replica_seconds(self, candidate: Candidate, backward: float) -> float:
        """Return the seconds of the reduction over copies that nothing hides."""
        if candidate.dp_replicate == 1:
            return 0.0
        sizes = zip(self._sizes.layers, self._sizes.experts, strict=True)
        size = int(self._shard(candidate, max(map(sum, sizes))) * self._reduce)
        # Schedules that split the backward pass sum copies after it.
        is_early = candidate.pp == 1 or not SCHEDULES[candidate.schedule].splits_backward
        is_posted = is_early and not self._uses_fsdp(candidate)
        reduce = self._messages(
            candidate.mesh, candidate.offload, "all_reduce", size, DP_REPLICATE, is_posted=is_posted
        )
        layers = len(self._sizes.layers) / candidate.pp
        return layers * (max(0.0, reduce - backward) if self._speed.is_asynchronous else reduce)

    def _update_seconds(self, candidate: Candidate, matrices: Held, others: int) -> float:
        whole = self._matrices(matrices, candidate.mesh, candidate.offload) if matrices else 0.0
        shard = self._shard(candidate, others)
        rate = self._speed.memory_gb_per_second[-1][1]
        if candidate.offload == "cpu":
            rate = self._speed.host_memory_gb_per_second
        return whole + self._touched * self._sizes.trained_share * shard / (rate * GB)

    def _border_seconds(self, candidate: Candidate) -> float:
        """Return the seconds of messages between stages that a process waits for."""
        if candidate.pp == 1:
            return 0.0
        size = candidate.micro_batch_size * self._length * self._sizes.hidden * self._compute // candidate.cp
        if candidate.sequence_parallel:
            size //= candidate.tp
        crossings = 2 * (candidate.pp - 1) * candidate.stages_per_rank
        return crossings * self._messages(candidate.mesh, candidate.offload, "send", size, PP)


@cache
def _live_chunks(schedule: ScheduleName, pp: int, stages_per_rank: int, number: int) -> list[int]:
    """Return for each pp rank how many passes keep their activations at once, at most."""
    owners = stage_owners(PipelinePlan(schedule=schedule, stages_per_rank=stages_per_rank), pp)
    found = []
    for passes in pass_orders(schedule, owners, number):
        separate = {(it.stage, it.microbatch) for it in passes if it.phase == WEIGHTS}
        level = highest = 0
        for it in passes:
            if it.phase == FORWARD:
                level += 1
            elif it.phase == WEIGHTS or (it.phase == BACKWARD and (it.stage, it.microbatch) not in separate):
                level -= 1
            highest = max(highest, level)
        found.append(highest)
    return found
