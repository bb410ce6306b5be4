"""Self-checks: what must hold if the plan is right.

The parameters are checked once they have values, inputs and gradients in one step. Checks are cheap
at these points. A plan that breaks a check would still train with a plausible loss, and drift away
from what one process computes.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshtrain.config.data import IGNORE_INDEX
from meshtrain.config.mesh import AXES, MODEL_AXES, PP, STAGE_AXES, TP
from meshtrain.errors import Problem, TrainingStopped, name_some
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.agreement import gather_objects, raise_together
from meshtrain.runtime.mesh import all_reduce_over, axis_rank, axis_size
from meshtrain.training.checksums import checksum, is_sharded, whole_checksums

ADVICE = (
    "this is a fault of the plan or of meshtrain, not of the data: run `meshtrain check`, report it, or switch the "
    "checks off with self_checks = false"
)
TOKENS = ("input_ids", "labels", "mismatched_input_ids", "mismatched_labels")
ADAPTER = ".lora_"
"""What the names of the parameters of adapters have in common."""


@dataclass(frozen=True)
class Held:
    """One parameter of a stage, as its process describes it to the processes of other stages.

    Attributes:
        stage: index of the stage.
        fqn: name in a checkpoint; a tied weight's copy on another stage has that of the original.
        is_copy: whether it is such a copy.
        checksum: checksum of the full parameter, signed 64 bits.
    """

    stage: int
    name: str
    fqn: str
    is_copy: bool
    checksum: int


@dataclass(frozen=True)
class ParameterReport:
    """Result of a check of the parameters that found no problem.

    Attributes:
        checksum: 16 hexadecimal digits that depend on every bit of every parameter, but not on the
            mesh.
        tied_copies: the parameters that a second stage holds as well.
    """

    checksum: str
    tied_copies: tuple[str, ...]


class FirstStepCheck:
    """An inspection of the first step that changes parameters; it lets all other steps pass."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._is_due = True

    def __call__(self, batch: Mapping[str, Tensor]) -> None:
        """Check the step if it is the first."""
        if self._is_due:
            self._is_due = False
            check_step(self._pipeline, batch)


def check_parameters(pipeline: Pipeline) -> ParameterReport:
    """Check that the stages together hold the model, and that all copies are equal. Collective.

    Raises:
        TrainingStopped: on all processes alike, with the names of parameters and ranks.
    """
    names = [name for name, _ in pipeline.named_parameters()]
    checksums = whole_checksums(pipeline)
    problems = list(_unequal_replicas(pipeline.mesh, names, checksums))
    held = _gather_stages(pipeline, dict(zip(names, checksums.tolist(), strict=True)))
    problems += _misplaced(held, pipeline.parameter_names)
    problems += _unequal_ties(held)
    raise_together(_advised(problems), TrainingStopped)
    total = sum(one.checksum for one in held if not one.is_copy) % 2**64
    return ParameterReport(f"{total:016x}", tuple(one.name for one in held if one.is_copy))


def frozen_checksum(pipeline: Pipeline) -> str:
    """Return the checksum of the frozen parameters, which does not depend on the plan. Collective.

    It has 16 hexadecimal digits. The parts of a fused parameter count as that parameter.
    """
    return _checksum_of(pipeline, {name for name, it in pipeline.named_parameters() if not it.requires_grad})


def stock_checksum(pipeline: Pipeline) -> str:
    """Return the checksum of all parameters but adapters, as `frozen_checksum`. Collective."""
    return _checksum_of(pipeline, {name for name, _ in pipeline.named_parameters() if ADAPTER not in name})


def _checksum_of(pipeline: Pipeline, chosen: set[str]) -> str:
    checksums = whole_checksums(pipeline, as_stock=True).tolist()
    names = [name for name, _ in pipeline.named_parameters()]
    held = _gather_stages(pipeline, dict(zip(names, checksums, strict=True)))
    every = {name for answer in gather_objects(chosen) for name in answer}
    return f"{sum(one.checksum for one in held if not one.is_copy and one.name in every) % 2**64:016x}"


def check_step(pipeline: Pipeline, batch: Mapping[str, Tensor]) -> None:
    """Check the inputs of a step and the gradients of its backward pass. Collective.

    Args:
        batch: the batch of this process; all processes of a tp group and of a pipeline must have
            the same.

    Raises:
        TrainingStopped: on all processes alike, with the names of inputs or parameters and ranks.
    """
    problems = [*_unequal_batches(pipeline, batch), *_unequal_gradients(pipeline)]
    raise_together(_advised(problems), TrainingStopped)


def _unequal_replicas(mesh: DeviceMesh, names: list[str], checksums: Tensor) -> Iterable[str]:
    for axis in STAGE_AXES:
        for other, theirs in enumerate(_gather_along(mesh, axis, checksums)):
            different = [name for name, same in zip(names, (theirs == checksums).tolist(), strict=True) if not same]
            if different:
                yield (
                    f"parameters differ between {_ranks(mesh, axis, other)}, which must hold the same: "
                    f"{name_some(different)}"
                )


def _gather_along(mesh: DeviceMesh, axis: str, values: Tensor) -> list[Tensor]:
    """Return the values of every process along an axis, in the order of the axis."""
    if axis_size(mesh, axis) == 1:
        return [values]
    gathered = [torch.empty_like(values) for _ in range(axis_size(mesh, axis))]
    dist.all_gather(gathered, values, group=mesh.get_group(axis))
    return gathered


def _ranks(mesh: DeviceMesh, axis: str, other: int) -> str:
    """Return the ranks of this process and of the one at `other` on an axis, as text."""
    place = [axis_rank(mesh, name) for name in AXES]
    pair = {dist.get_rank()}
    place[AXES.index(axis)] = other
    pair.add(int(mesh.mesh[tuple(place)]))
    return f"ranks {' and '.join(map(str, sorted(pair)))} ({axis})"


def _gather_stages(pipeline: Pipeline, checksums: Mapping[str, int]) -> list[Held]:
    """Return the parameters that all stages of this pipeline hold."""
    canonical = pipeline.canonical_names()
    mine = []
    for stage in pipeline.stages:
        # Both ends of a tied weight may be on this stage, and the copy may come first.
        here = {name for name, _ in stage.named_parameters(remove_duplicate=False)}
        for name, _ in stage.named_parameters():
            mine.append(Held(stage.index, name, canonical[name], canonical[name] not in here, checksums[name]))
    if pipeline.peers is None:
        return mine
    answers: list[list[Held]] = [[] for _ in range(axis_size(pipeline.mesh, PP))]
    dist.all_gather_object(answers, mine, group=pipeline.mesh.get_group(PP))
    return [one for answer in answers for one in answer]


def _misplaced(held: list[Held], expected: frozenset[str]) -> Iterable[str]:
    """Yield a line for parameters that are not in exactly one stage.

    Copies of tied weights on another stage do not count.
    """
    stages: dict[str, list[int]] = defaultdict(list)
    for one in held:
        if not one.is_copy:
            stages[one.fqn].append(one.stage)
    if missing := sorted(expected - stages.keys()):
        yield f"parameters are in no stage: {name_some(missing)}"
    if unknown := sorted(stages.keys() - expected):
        yield f"stages hold parameters that the model does not have: {name_some(unknown)}"
    repeated = [f"{fqn} ({', '.join(map(str, where))})" for fqn, where in sorted(stages.items()) if len(where) > 1]
    if repeated:
        yield f"parameters are in more than one stage: {name_some(repeated)}"


def _unequal_ties(held: list[Held]) -> Iterable[str]:
    originals = {one.fqn: one for one in held if not one.is_copy}
    for copy in held:
        original = originals.get(copy.fqn)
        if copy.is_copy and original is not None and copy.checksum != original.checksum:
            yield (
                f"{copy.name} in stage {copy.stage} is tied to {copy.fqn} in stage {original.stage}, but their values "
                "differ"
            )


def _unequal_batches(pipeline: Pipeline, batch: Mapping[str, Tensor]) -> Iterable[str]:
    mesh, values = pipeline.mesh, {**batch, "trained tokens": batch["labels"] != IGNORE_INDEX}
    # Stages between the embedding and the head read no tokens.
    has_tokens = pipeline.has_first_stage or pipeline.has_last_stage
    is_read = torch.tensor([has_tokens or name not in TOKENS for name in values])
    checksums = torch.tensor([checksum(value, name) for name, value in values.items()], dtype=torch.int64)
    for axis in MODEL_AXES:
        for other, (theirs, they_read) in enumerate(
            _gather_along(mesh, axis, torch.stack([checksums, is_read.long()]))
        ):
            is_unequal = (theirs != checksums) & is_read & they_read.bool()
            if different := [name for name, found in zip(values, is_unequal.tolist(), strict=True) if found]:
                yield (
                    f"the batches of {_ranks(mesh, axis, other)} differ in {name_some(different)}; all processes of a "
                    "pipeline, a cp group and a tp group must read the same"
                )


@torch.no_grad()
def _unequal_gradients(pipeline: Pipeline) -> Iterable[str]:
    """Yield a line for parameters that a tp group holds in full, but whose gradients differ.

    The sums behind them are the same on every process, but some kernels add in an order of their
    own. So differences up to the square root of the number format's precision are accepted. A
    gradient that lacks a sum is wrong by its own size.
    """
    mesh = pipeline.mesh
    tolerance = torch.finfo(getattr(torch, pipeline.plan.precision.activations)).eps ** 0.5
    different = []
    for name, parameter in pipeline.trainable_parameters():
        if axis_size(mesh, TP) > 1 and not is_sharded(parameter, TP):
            error = _spread(parameter, mesh)
            if not error <= tolerance:
                different.append(f"{name} by {error:.0e}")
    if different:
        group = ", ".join(map(str, dist.get_process_group_ranks(mesh.get_group(TP))))
        yield (
            f"gradients differ between the ranks {group} of a tp group (more than {tolerance:.0e} of their largest "
            f"element), although each holds the full parameter: {name_some(different)}; is a sum over tp missing?"
        )


def _spread(parameter: nn.Parameter, mesh: DeviceMesh) -> float:
    """Return the largest difference between a tp group's gradients, over their largest element."""
    assert parameter.grad is not None
    gradient = local_tensor(parameter.grad)
    gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    if gradient.numel() == 0:
        return 0.0
    both = all_reduce_over(torch.stack([gradient, -gradient]), mesh, [TP], op=dist.ReduceOp.MAX)
    largest = both.abs().max()
    return float((both[0] + both[1]).max() / largest) if largest > 0 else 0.0


def _advised(problems: list[str]) -> list[Problem]:
    return [Problem(problem, ADVICE, about="self-check") for problem in problems]
