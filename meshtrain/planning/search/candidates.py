"""All plans that come into question for a run on some processes."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple

from meshtrain.config.mesh import AXES, MeshPlan
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.run import RunConfig
from meshtrain.config.schedules import SCHEDULES, ScheduleName, in_equal_rounds
from meshtrain.parallel.check.shard import WHOLE_PARAMETERS, resolve_shard
from meshtrain.parallel.shard import has_formats

Reshard = Literal["always", "never"]
Recompute = Literal["none", "selective", "full"]
# Schedule and stages of a process. GPipe and LoopedBFS hold more activations than their 1F1B
# counterparts, and are not faster. torch runs the pairs of passes of DualPipeV one after the other,
# so that ZBVZeroBubble is as fast.
PIPELINES: tuple[tuple[ScheduleName, int], ...] = (
    ("1F1B", 1),
    ("Interleaved1F1B", 2),
    ("Interleaved1F1B", 4),
    ("InterleavedZeroBubble", 2),
    ("ZBVZeroBubble", 2),
)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
MOST_ROWS = 64
# Sequences of this many tokens are worth dividing among processes.
LONG, MOST_CP = 16_384, 8


class Cut(NamedTuple):
    """How tensor parallelism cuts layers."""

    tp: int
    sequence_parallel: bool


class Kind(NamedTuple):
    """What determines the layers of a candidate."""

    cut: Cut
    recompute: Recompute


class HeadKind(NamedTuple):
    """What determines the head and the loss of a candidate."""

    cut: Cut
    loss_parallel: bool


@dataclass(frozen=True)
class Candidate:
    """The settings in which candidates differ."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int
    schedule: ScheduleName
    stages_per_rank: int
    micro_batch_size: int
    recompute: Recompute
    sequence_parallel: bool
    reshard: Reshard
    offload: Literal["none", "cpu"]
    ep: int = 1
    cp: int = 1
    loss_parallel: bool = True

    @property
    def data_degree(self) -> int:
        """Return the number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard * self.ep

    @property
    def sharding_degree(self) -> int:
        """Return the number of ranks among which FSDP2 shards parameters."""
        return self.dp_shard * self.ep * self.cp

    @property
    def num_stages(self) -> int:
        """Return the number of stages of the pipeline."""
        return self.pp * self.stages_per_rank

    @property
    def mesh(self) -> tuple[int, ...]:
        """Return the degrees of all axes, in the order of `AXES`."""
        return self.pp, self.dp_replicate, self.dp_shard, self.ep, self.cp, self.tp

    @property
    def cut(self) -> Cut:
        """Return how its layers are cut."""
        return Cut(self.tp, self.sequence_parallel)

    @property
    def kind(self) -> Kind:
        """Return what determines its layers."""
        return Kind(self.cut, self.recompute)

    @property
    def head_kind(self) -> HeadKind:
        """Return what determines its head and its loss."""
        return HeadKind(self.cut, self.loss_parallel)

    def plan(self, plan: ParallelPlan) -> ParallelPlan:
        """Return a plan with these settings."""
        tables: dict[str, dict[str, Any]] = {
            "mesh": dict(zip(AXES, self.mesh, strict=True)),
            "pipeline": {"schedule": self.schedule, "stages_per_rank": self.stages_per_rank},
            "tensor": {"sequence_parallel": self.sequence_parallel, "loss_parallel": self.loss_parallel},
            "shard": {"reshard_after_forward": self.reshard, "offload": self.offload},
            "recompute": {"mode": self.recompute},
        }
        if self.num_stages != plan.mesh.pp * plan.pipeline.stages_per_rank:
            # A list for another number of stages does not fit.
            layers = plan.pipeline.layers_per_stage
            tables["pipeline"] |= {"layers_per_stage": layers if layers == "even" else "balanced", "split_at": None}
        return plan.model_copy(
            update={name: getattr(plan, name).model_copy(update=values) for name, values in tables.items()}
        )

    def described(self) -> str:
        """Return the settings in a few words."""
        degrees = zip(AXES, self.mesh, strict=True)
        words = [" x ".join(f"{axis} {degree}" for axis, degree in degrees if degree > 1) or "one process"]
        if self.pp > 1:
            words.append(self.schedule + (f" with {self.stages_per_rank}" if self.stages_per_rank > 1 else ""))
        words.append(f"microbatch {self.micro_batch_size}")
        words += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        words += ["sequence parallel"] if self.sequence_parallel else []
        words += ["whole logits"] if self.tp > 1 and not self.loss_parallel else []
        words += ["reshard"] if self.reshard == "always" else []
        words += ["offload"] if self.offload == "cpu" else []
        return ", ".join(words)


def needs_sharded(candidate: Candidate, plan: ParallelPlan) -> bool:
    """Return whether FSDP2 works more for a candidate than for the run on one process.

    Args:
        candidate: its settings.
        plan: of the run, for its number formats.
    """
    return candidate.sharding_degree > 1 or (candidate.offload == "cpu" and not has_formats(plan))


class Choices:
    """The values of each setting: all that come into question, or the one that the user has set.

    Args:
        config: of the run.
        pinned: keys that the user has set, such as "plan.mesh.tp".
    """

    def __init__(self, config: RunConfig, pinned: Collection[str]) -> None:
        self._config, self._pinned = config, pinned

    def of(self, key: str, options: Sequence[Any]) -> Sequence[Any]:
        """Return the values of a key."""
        parts = key.split(".")
        above = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
        if not above & set(self._pinned):
            return options
        holder: Any = self._config
        for part in parts:
            holder = getattr(holder, part)
        return [holder]


def candidates(
    config: RunConfig,
    pinned: Collection[str],
    world_size: int,
    num_layers: int,
    on_host: int,
    *,
    may_offload: bool = True,
    num_experts: int = 0,
    takes_cp: bool = False,
) -> Iterator[Candidate]:
    """Yield every plan that comes into question.

    Args:
        config: of the run.
        pinned: keys that the user has set, such as "plan.mesh.tp".
        world_size: number of processes.
        num_layers: of the model.
        on_host: number of processes on a host; tp stays inside.
        may_offload: whether host memory is another one than that of the accelerator.
        num_experts: a number that ep must divide; 0: there are no experts.
        takes_cp: whether the model computes on parts of sequences that are worth dividing.
    """
    offloads = ("none", "cpu") if may_offload else ("none",)
    choices = Choices(config, pinned)
    parts = _divisors(MOST_CP) if takes_cp else [1]
    for tp, cp in product(
        choices.of("plan.mesh.tp", [degree for degree in _divisors(world_size) if degree <= on_host]),
        choices.of("plan.mesh.cp", parts),
    ):
        # The most of one host, or of all processes, that divide the experts.
        most = {math.gcd(num_experts, max(1, number // (tp * cp))) for number in (on_host, world_size)}
        for ep in choices.of("plan.mesh.ep", sorted({1, *most}) if num_experts else [1]):
            yield from _over_stages(config, choices, world_size, num_layers, on_host, (tp, cp, ep), offloads)


def _over_stages(
    config: RunConfig,
    choices: Choices,
    world_size: int,
    num_layers: int,
    on_host: int,
    degrees: tuple[int, int, int],
    offloads: Sequence[str],
) -> Iterator[Candidate]:
    tp, cp, ep = degrees
    inner = tp * cp * ep
    for pp in choices.of("plan.mesh.pp", _divisors(world_size // inner)):
        if world_size % (inner * pp) or pp > num_layers + 1:
            continue
        for replicate, shard in _data_degrees(choices, world_size // (inner * pp), max(1, on_host // inner)):
            mesh = MeshPlan(pp=pp, dp_replicate=replicate, dp_shard=shard, ep=ep, cp=cp, tp=tp)
            for schedule, stages in _pipelines(choices, pp, num_layers):
                yield from _variants(config, choices, mesh, schedule, stages, offloads)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _data_degrees(choices: Choices, number: int, on_host: int) -> Iterator[tuple[int, int]]:
    """Yield dp_replicate and dp_shard: no sharding, inside hosts, over all, beside fixed copies."""
    usual = {1, math.gcd(number, on_host), number}
    # What fixed copies leave is sharded.
    usual |= {number // copies for copies in choices.of("plan.mesh.dp_replicate", []) if number % copies == 0}
    for shard in choices.of("plan.mesh.dp_shard", sorted(usual)):
        degree = number if shard == -1 else shard
        for replicate in choices.of("plan.mesh.dp_replicate", [max(1, number // degree)]):
            # An open dp_shard takes what another axis leaves.
            wanted = number // replicate if shard == -1 else degree
            if wanted >= 1 and replicate * wanted == number:
                yield replicate, wanted


def _pipelines(choices: Choices, pp: int, num_layers: int) -> Iterator[tuple[ScheduleName, int]]:
    if pp == 1:
        yield "1F1B", 1
        return
    schedules = choices.of("plan.pipeline.schedule", sorted({name for name, _ in PIPELINES}))
    for schedule in schedules:
        needed = SCHEDULES[schedule].stages_per_rank
        usual = [stages for name, stages in PIPELINES if name == schedule] or [needed or 2]
        for stages in choices.of("plan.pipeline.stages_per_rank", usual):
            if pp * stages <= num_layers + 1:
                yield schedule, stages


def _variants(
    config: RunConfig,
    choices: Choices,
    mesh: MeshPlan,
    schedule: ScheduleName,
    stages: int,
    offloads: Sequence[str],
) -> Iterator[Candidate]:
    pp, tp = mesh.pp, mesh.tp
    per_rank = config.global_batch_size // mesh.data_degree
    is_split = SCHEDULES[schedule].splits_backward and pp > 1
    rows = [2**power for power in range(MOST_ROWS.bit_length()) if 2**power <= per_rank]
    level = resolve_shard(config.plan)
    shards_nothing = not mesh.is_sharded and mesh.dp_replicate > 1 and level.level in WHOLE_PARAMETERS
    if shards_nothing or (is_split and level.reduces_each_microbatch):
        return
    # `check` refuses others, because torch would lose gradients, or because of the level.
    is_kept = is_split or not mesh.is_sharded or level.level in WHOLE_PARAMETERS
    usual: Reshard = "never" if pp > 1 or is_kept else "always"
    reshards: list[str] = ["never"] if is_kept else ["always", "never"]
    for size, recompute, sequence, reshard, offload, loss in product(
        choices.of("micro_batch_size", rows),
        choices.of("plan.recompute.mode", ("none", "full") if is_split else RECOMPUTE),
        choices.of("plan.tensor.sequence_parallel", [True, False] if tp > 1 else [False]),
        choices.of("plan.shard.reshard_after_forward", reshards),
        choices.of("plan.shard.offload", offloads),
        choices.of("plan.tensor.loss_parallel", [True, False] if tp > 1 else [True]),
    ):
        if config.batch_ramp.unit(config.global_batch_size) % (mesh.data_degree * size):
            continue
        number = per_rank // size
        if pp > 1 and not _has_enough(schedule, number, pp, pp * stages):
            continue
        resolved = usual if reshard == "auto" else reshard
        settings = schedule, stages, size, recompute, sequence, resolved, offload
        yield Candidate(
            mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.tp, *settings, ep=mesh.ep, cp=mesh.cp, loss_parallel=loss
        )


def _has_enough(schedule: ScheduleName, number: int, pp: int, num_stages: int) -> bool:
    """Return whether a schedule takes a number of microbatches, and all stages have work."""
    need = SCHEDULES[schedule].microbatches
    if need == "one per stage" and number < num_stages:
        return False
    if need == "equal rounds" and number != in_equal_rounds(number, pp):
        return False
    return number >= pp
