"""A run whose plan is searched."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from transformers import PreTrainedModel

from meshtrain.config.batch_ramp import NO_RAMP
from meshtrain.config.families import with_family
from meshtrain.config.mesh import AXES, MeshPlan
from meshtrain.config.plan import TensorPlan
from meshtrain.config.run import RunConfig
from meshtrain.errors import UserError
from meshtrain.parallel.check import resolve_plan
from meshtrain.parallel.check.context import check_context
from meshtrain.parallel.check.head import resolve_loss
from meshtrain.parallel.cut.probe import Structure, structures_shared
from meshtrain.parallel.moment_blocks import check_moment_blocks
from meshtrain.planning.machine import Machine
from meshtrain.planning.needs import simulated_run
from meshtrain.planning.search.candidates import LONG, Candidate, HeadKind, Kind
from meshtrain.planning.search.layers import MICROBATCHES
from meshtrain.planning.simulation.run import SimulatedRun
from meshtrain.training.resolve import ResolvedRun, resolve_run

Result = TypeVar("Result")
# Settings of a plan that a search sets. Those for one process fit every model.
_ALONE = {
    "mesh": dict.fromkeys(AXES, 1),
    "pipeline": {"schedule": "1F1B", "stages_per_rank": 1, "layers_per_stage": "balanced", "split_at": None},
    "tensor": {"sequence_parallel": False, "loss_parallel": True},
    "shard": {"reshard_after_forward": "auto", "offload": "none"},
    "recompute": {"mode": "none"},
}


@dataclass(frozen=True)
class Wanted:
    """A run whose plan is searched.

    Attributes:
        config: of the run.
        base: the run, resolved for one process.
        machine: on which it will run.
        world_size: number of processes.
        tensors: tp, sequence parallel and loss parallel -> the tensor rules, once they are known.
        structures: of the model of `base`, once it is known.
    """

    config: RunConfig
    base: ResolvedRun
    machine: Machine
    world_size: int
    tensors: dict[HeadKind, TensorPlan] = field(default_factory=dict)
    structures: dict[PreTrainedModel, Structure] = field(default_factory=dict)

    def resolved(self, candidate: Candidate, *, runs_model: bool = False) -> ResolvedRun:
        """Return the run with the plan of a candidate.

        Args:
            candidate: its settings.
            runs_model: whether to run the model on meta, as `meshtrain check` does.

        Raises:
            UserError: if the plan contradicts the model or the batches.
        """
        wanted, rows = candidate.plan(self.config.plan), candidate.micro_batch_size
        base = self.base
        number, each = self.config.global_batch_size, base.batch.rows
        smaller = tuple(self.config.batch_ramp.sizes(number))
        batch = replace(base.batch, global_batch_size=each * number, micro_batch_size=each * rows, smaller=smaller)
        plan = resolve_plan(
            with_family(wanted, base.hf_config.model_type),
            base.model,
            batch,
            self.world_size,
            router=self.config.router,
            known_tensor=None if runs_model else self.tensors.get(candidate.head_kind),
            runs_model=runs_model,
        )
        check_moment_blocks(base.model, base.adapters, self.config.optimizer, plan)
        config = self.config.model_copy(update={"plan": wanted, "micro_batch_size": rows})
        return replace(base, config=config, plan=plan, batch=batch)

    def of_layers(self, kind: Kind, rows: int, *, loss_parallel: bool, shards: int = 1) -> tuple["Wanted", Candidate]:
        """Return a run on one stage, to look at its layers, and its only candidate.

        Args:
            kind: of the layers.
            rows: sequences of a microbatch.
            loss_parallel: whether the loss uses parts of the logits.
            shards: processes among which FSDP2 shards the layers.
        """
        (tp, sequence_parallel), recompute = kind
        batch = {"global_batch_size": shards * MICROBATCHES * rows, "batch_ramp": NO_RAMP}
        candidate = Candidate(1, 1, shards, tp, "1F1B", 1, rows, recompute, sequence_parallel, "never", "none")
        candidate = replace(candidate, loss_parallel=loss_parallel)
        return replace(self, config=self.config.model_copy(update=batch), world_size=shards * tp), candidate

    def tokens_at_once(self, kind: HeadKind, rows: int, cp: int) -> int:
        """Return for how many tokens of a microbatch a process has logits at once.

        Args:
            kind: of the head.
            rows: sequences of a microbatch.
            cp: processes that share a sequence.
        """
        (tp, _), loss_parallel = kind
        tensor = self.base.plan.tensor.model_copy(update={"loss_parallel": loss_parallel})
        mesh = MeshPlan(dp_shard=1, cp=cp, tp=tp)
        plan = self.config.plan.model_copy(update={"mesh": mesh, "tensor": tensor})
        batch = replace(self.base.batch, micro_batch_size=self.base.batch.rows * rows)
        tokens = batch.micro_batch_size * batch.sequence_length // cp
        chunk = resolve_loss(plan, self.base.model, batch, runs_model=False).chunk_tokens
        assert isinstance(chunk, int)
        return min(chunk or tokens, tokens)

    def takes_cp(self) -> bool:
        """Return whether the model computes on parts of sequences that are worth dividing."""
        if self.base.batch.sequence_length < LONG:
            return False
        two = self.base.plan.model_copy(update={"mesh": MeshPlan(dp_shard=1, cp=2)})
        return not list(check_context(two, self.base.model, self.base.batch))

    def simulated(self, candidate: Candidate) -> SimulatedRun:
        """Return what the simulation of a candidate needs; its tensor rules are known from then on.

        Raises:
            UserError: if the plan contradicts the model or the batches.
        """
        resolved = self.resolved(candidate)
        self.tensors[candidate.head_kind] = resolved.plan.tensor
        return simulated_run(resolved, on_gpus=not self.machine.is_cpu, granularity=self.machine.granularity)

    def contradiction(self, candidate: Candidate) -> UserError | None:
        """Return what `meshtrain check` would say of a candidate, if it would refuse it."""
        try:
            self.resolved(candidate, runs_model=True)
        except UserError as error:
            return error
        return None

    def attempted(self, candidate: Candidate, simulate: Callable[[], Result]) -> Result | UserError:
        """Return what a simulation of a candidate returns, or what contradicts the candidate."""
        try:
            with structures_shared(self.structures):
                return simulate()
        except UserError as error:
            return error
        except Exception:
            contradiction = self.contradiction(candidate)
            if contradiction is None:
                raise
            return contradiction


def wanted_run(config: RunConfig, machine: Machine, world_size: int) -> Wanted:
    """Return a run whose plan is searched.

    Args:
        config: of the run.
        machine: on which it will run.
        world_size: number of processes.

    Raises:
        UserError: for a contradiction that no plan changes.
    """
    machine.check_number_format(config.plan.precision.products)
    tables = {name: getattr(config.plan, name).model_copy(update=values) for name, values in _ALONE.items()}
    plan = config.plan.model_copy(update=tables)
    alone = config.model_copy(update={"plan": plan, "micro_batch_size": 1})
    return Wanted(config, resolve_run(alone, 1), machine, world_size)
