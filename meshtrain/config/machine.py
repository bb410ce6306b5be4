"""The description of a machine that a plan is sized for: its memory, and how fast it is."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Self, get_args

from pydantic import AfterValidator, Field, model_validator

from meshtrain.config.plan import ComputeDtype
from meshtrain.config.settings import REMEDY, Count, Fraction, Positive, Settings
from meshtrain.errors import ConfigError

NotNegativeNumber = Annotated[float, Field(ge=0.0, le=1e6, allow_inf_nan=False)]
Number = Annotated[float, Field(gt=0.0, le=1e24, allow_inf_nan=False)]

# No datasheet has it.
HostSeconds = Annotated[
    float,
    Field(ge=0.0, le=1.0, allow_inf_nan=False, json_schema_extra={REMEDY: "measure it: meshtrain calibrate FILE"}),
]


def _ascending(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    for (x, _), (following, _) in pairwise(points):
        if following <= x:
            raise ConfigError(f"expected ascending sizes, found {following:g} after {x:g}", "sort the points")
    return points


# A list of points [size, value], with ascending sizes. Between two points, the logarithms of both
# are interpolated.
Curve = Annotated[
    list[Annotated[tuple[Number, Number], Field(strict=False)]], Field(min_length=1), AfterValidator(_ascending)
]


# An all_reduce that is posted, and awaited after something has been computed.
POSTED = "posted_all_reduce"
MESSAGES = ("all_reduce", POSTED, "all_gather", "reduce_scatter", "send")
# The products of a plan, and those of blocks of 8 bits.
FORMATS = (*get_args(ComputeDtype), "mxfp8")


def _one_of(names: Sequence[str]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in names:
            raise ConfigError(f"expected one of {', '.join(names)}, found {name!r}", "correct the name")
        return name

    return AfterValidator(check)


def _with_a_rate(rates: dict[str, float]) -> dict[str, float]:
    if not rates:
        raise ConfigError("there is no rate", "give that of float32 at least")
    return rates


def _is_number_of_processes(text: str) -> str:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"expected a number of processes, found {text!r}", "give a whole number from 1")
    return text


NumberOfProcesses = Annotated[str, AfterValidator(_is_number_of_processes)]


class LinkConfig(Settings):
    """A connection between processes."""

    gb_per_second: Positive
    """Bandwidth of one process in one direction, in 10^9 bytes per second."""
    seconds: Annotated[float, Field(ge=0.0, le=10.0, allow_inf_nan=False)]
    """Time until the first byte arrives, in seconds."""


class SpeedConfig(Settings):
    """How fast a machine computes and sends."""

    processes_per_host: Count
    """Number of processes on one host, usually one for each accelerator."""
    is_asynchronous: bool
    """Whether the host goes on while the accelerator computes, and messages travel at the same
    time. True for GPUs, False for a CPU."""
    operator_seconds: HostSeconds
    """Time that the host needs to start one operator, in seconds. An accelerator cannot be faster
    than that; on a CPU it is added."""
    hook_seconds: HostSeconds
    """Time that the host needs for one piece of FSDP2's hooks besides its operators, in seconds. A
    layer has some ten of them for each microbatch."""
    peak_tflops: Annotated[dict[Annotated[str, _one_of(FORMATS)], Positive], AfterValidator(_with_a_rate)]
    """Number format -> highest rate of matrix products, in 10^12 operations per second. MFU is
    relative to it."""
    matmul_efficiency: Curve
    """Points [operations of a matrix product, part of `peak_tflops` that it reaches]."""
    attention_efficiency: Curve
    """Points [operations of attention, part of `peak_tflops` that it reaches]."""
    memory_gb_per_second: Curve
    """Points [bytes that an operator reads and writes, 10^9 bytes per second], for operators other
    than matrix products and attention."""
    within_host: LinkConfig
    """The connection of processes on one host."""
    between_hosts: LinkConfig
    """The connection of processes on different hosts."""
    host_memory_gb_per_second: Positive
    """Bandwidth of the host's memory for one process, in 10^9 bytes per second. With
    `shard.offload`, the optimizer runs there."""
    host_link_gb_per_second: Positive
    """Bandwidth between host and accelerator in one direction, in 10^9 bytes per second."""
    operators: dict[str, Curve] = {}
    """Measured operators: "name dtype" -> points [operations or bytes, seconds]. Operations count
    for matrix products and attention, bytes for all others. Replaces the rates above."""
    messages: dict[Annotated[str, _one_of(MESSAGES)], dict[NumberOfProcesses, Curve]] = {}
    """Measured messages: name -> number of processes -> points [bytes, seconds]. Replaces
    `within_host` for groups on one host. `posted_all_reduce` is what an all_reduce adds to a
    backward pass of a CPU that goes on meanwhile."""


class MachineConfig(Settings):
    """An accelerator, in one TOML file."""

    memory_gib: Positive
    """Memory of one accelerator that torch can allocate, in GiB."""
    reserved_gib: NotNegativeNumber
    """Memory that is in use besides tensors, in GiB: the context of CUDA, the buffers of NCCL, the
    workspace of cuBLAS."""
    fragmentation: Fraction
    """Memory that torch's allocator holds in unusable pieces, as a fraction of the peak."""
    source: str
    """Where these numbers come from."""
    measured: list[str] = []
    """Names of the constants that were measured with meshtrain. All others are estimates."""
    device_names: list[str] = []
    """Names that torch.cuda.get_device_name reports for it. A run on such a GPU finds a shipped
    description by them."""
    sources: dict[str, str] = {}
    """Name of a constant -> where it comes from, where that is not `source`."""
    speed: SpeedConfig | None = None
    """How fast the machine is. Without this table, no seconds are predicted."""

    @model_validator(mode="after")
    def _names_its_constants(self) -> Self:
        known = self.constants()
        for name in [*self.measured, *self.sources]:
            if name not in known:
                raise ConfigError(f"{name!r} is not a constant of the file", f"there are {', '.join(known)}")
        return self

    @model_validator(mode="after")
    def _leaves_memory(self) -> Self:
        if self.reserved_gib >= self.memory_gib:
            raise ConfigError(
                f"reserved_gib is {self.reserved_gib:g}, but the machine has {self.memory_gib:g} GiB",
                "give a part of memory_gib, or 0",
            )
        return self

    def constants(self) -> list[str]:
        """Return the names of all constants of the file."""
        speed = () if self.speed is None else (f"speed.{name}" for name in SpeedConfig.model_fields)
        return ["memory_gib", "reserved_gib", "fragmentation", *speed]

    def not_measured(self) -> list[str]:
        """Return the names of the constants that were not measured."""
        return [name for name in self.constants() if name not in self.measured]
