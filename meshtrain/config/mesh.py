"""The axes of the mesh: their names, what each of them splits, and their degrees in a plan.

A new axis is a field of `MeshPlan` and a row of `ROLES`. Code that does not compute on one
particular axis uses the groups below, and so needs no change.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, field_validator

from meshtrain.config.settings import Settings
from meshtrain.errors import ConfigError, PlanError

LARGEST_DEGREE = 10**6
Degree = Annotated[int, Field(ge=1, le=LARGEST_DEGREE)]
PP, DP_REPLICATE, DP_SHARD, EP, CP, TP = "pp", "dp_replicate", "dp_shard", "ep", "cp", "tp"


@dataclass(frozen=True)
class Role:
    """What an axis does to the work.

    Attributes:
        splits: what ranks along the axis divide among themselves.
        shards_parameters: whether a rank holds only a part of a parameter of its stage.
        divides_experts: whether experts lie whole on different ranks.
    """

    splits: Literal["layers", "samples", "tokens", "width"]
    shards_parameters: bool = False
    divides_experts: bool = False


# From the outermost to the innermost: neighbors on the last axis have consecutive ranks.
ROLES = {
    PP: Role("layers"),
    DP_REPLICATE: Role("samples"),
    DP_SHARD: Role("samples", shards_parameters=True),
    EP: Role("samples", shards_parameters=True, divides_experts=True),
    CP: Role("tokens", shards_parameters=True),
    TP: Role("width", shards_parameters=True),
}
AXES = tuple(ROLES)
# Ranks along these axes read different samples.
DATA_AXES = tuple(axis for axis in AXES if ROLES[axis].splits == "samples")
# Ranks along these axes read the same samples.
MODEL_AXES = tuple(axis for axis in AXES if axis not in DATA_AXES)
# Ranks along these axes hold the same stage.
STAGE_AXES = tuple(axis for axis in AXES if ROLES[axis].splits != "layers")
# The name of these axes as one.
STAGE = "stage"
# Ranks along these axes hold different parts of a parameter.
PARAMETER_AXES = tuple(axis for axis in AXES if ROLES[axis].shards_parameters)
# Ranks along these axes train different tokens, so their losses and gradients are summed.
TOKEN_AXES = tuple(axis for axis in AXES if ROLES[axis].splits in ("samples", "tokens"))
# FSDP2 shards parameters over these axes as one, and sums gradients over them.
FSDP_AXES = tuple(axis for axis in PARAMETER_AXES if axis in TOKEN_AXES)
# FSDP2 shards stacked experts over these axes, because each expert lies on one rank of the others.
EXPERT_FSDP_AXES = tuple(axis for axis in FSDP_AXES if not ROLES[axis].divides_experts)
# Name -> axes that are joined to one, if several of them are wide.
_JOINED = {"_".join(axes): axes for axes in (FSDP_AXES, EXPERT_FSDP_AXES)} | {STAGE: STAGE_AXES}
# Full copies of the model along these axes sum their gradients.
REPLICA_AXES = tuple(axis for axis in TOKEN_AXES if axis not in FSDP_AXES)


def fsdp_axis_of(degrees: Mapping[str, int], axes: Sequence[str] = FSDP_AXES) -> str:
    """Return the name of the axis of FSDP2 in the mesh of a parameter: one axis, or all joined.

    Args:
        degrees: of `axes`, at least.
        axes: FSDP_AXES, or EXPERT_FSDP_AXES for stacked experts.
    """
    wide = [axis for axis in axes if degrees[axis] > 1]
    return "_".join(axes) if len(wide) > 1 else (wide or axes)[0]


def axes_named(name: str) -> tuple[str, ...]:
    """Return the axes that one axis of the mesh of a parameter consists of."""
    return _JOINED.get(name, (name,))


class MeshPlan(Settings):
    """Number of ways in which each axis of the mesh splits the work. Their product is the
    number of processes."""

    pp: Degree = 1
    """Pipeline stages held by different processes."""
    dp_replicate: Degree = 1
    """Copies of the model, each of which sees different samples, as in DDP."""
    dp_shard: Annotated[int, Field(le=LARGEST_DEGREE)] = -1
    """Processes that share one copy of the model and see different samples (FSDP2). -1 takes
    all processes that the other axes leave."""
    ep: Degree = 1
    """Processes that hold different experts of a mixture of experts, whole, and see different
    samples (expert parallel). Each token travels to its experts and back. All other parameters are
    sharded over dp_shard, ep and cp together (FSDP2)."""
    cp: Degree = 1
    """Processes that share every sequence (context parallel): each has a part of its tokens, and
    attention alone sees all of them."""
    tp: Degree = 1
    """Processes that share every layer (tensor parallel). This is the innermost axis: keep it
    inside one machine."""

    @field_validator(DP_SHARD)
    @classmethod
    def _is_a_degree(cls, dp_shard: int) -> int:
        if dp_shard != -1 and dp_shard < 1:
            raise ConfigError(f"expected -1 (whatever is left) or a whole number from 1, found {dp_shard}")
        return dp_shard

    @property
    def degrees(self) -> dict[str, int]:
        """Axis -> number of ranks along it, -1 where it is open."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def open_axis(self) -> str | None:
        """The axis that takes all remaining processes, if there is one."""
        return next((axis for axis, degree in self.degrees.items() if degree == -1), None)

    @property
    def fixed_degree(self) -> int:
        """The product of all degrees that are not open."""
        return math.prod(degree for degree in self.degrees.values() if degree != -1)

    @property
    def world_size(self) -> int:
        """The number of processes of a mesh without an open axis."""
        return self.degree(*AXES)

    @property
    def data_degree(self) -> int:
        """The number of ranks that read different samples."""
        return self.degree(*DATA_AXES)

    @property
    def fsdp_degree(self) -> int:
        """The number of ranks over which FSDP2 shards a parameter."""
        return self.degree(*FSDP_AXES)

    @property
    def fsdp_axis(self) -> str:
        """The name of the axis of FSDP2 in the mesh of a parameter."""
        return fsdp_axis_of(self.degrees)

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards parameters; False while the axis for it is open."""
        return any(self.degrees[axis] > 1 for axis in FSDP_AXES)

    def degree(self, *axes: str) -> int:
        """Return the product of the degrees of some axes, none of which is open."""
        degrees = [self.degrees[axis] for axis in axes]
        assert -1 not in degrees, f"the mesh {self.degrees} is not resolved"
        return math.prod(degrees)

    def resolve(self, world_size: int) -> "MeshPlan":
        """Return the mesh with its open axis filled for a number of processes.

        Raises:
            PlanError: if its degrees do not fit the number of processes.
        """
        axis, fixed, degrees = self.open_axis, self.fixed_degree, self.described(only_wide=False)
        if axis is None and fixed != world_size:
            raise PlanError(
                f"mesh: {degrees} needs {fixed} processes, but there are {world_size}",
                f"start {fixed}, or set plan.mesh.dp_shard = -1 to use all available processes",
            )
        if world_size % fixed:
            raise PlanError(
                f"mesh: {degrees} uses processes in groups of {fixed}, but {world_size} is not a multiple of {fixed}",
                f"start a multiple of {fixed}, or change the degrees",
            )
        return self if axis is None else self.model_copy(update={axis: world_size // fixed})

    def described(self, *, only_wide: bool = True) -> str:
        """Return the mesh as "pp 2 x tp 2".

        Args:
            only_wide: leave out axes of one rank.
        """
        degrees = {axis: degree for axis, degree in self.degrees.items() if degree != -1}
        wide = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1 or not only_wide]
        return " x ".join(wide) or "one process"
