"""Seconds of an operator and of a message on a machine."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

from meshtrain.compat.operators_seen import ATTENTION, HOOK, message_kind
from meshtrain.config.machine import POSTED, LinkConfig, SpeedConfig
from meshtrain.config.mesh import AXES, EXPERT_FSDP_AXES, FSDP_AXES, STAGE, MeshPlan, axes_named, fsdp_axis_of
from meshtrain.planning.simulation.recorder import BLOCK_SCALES, Sent, Work, sent_and_computed

GB, TERA = 1e9, 1e12
FASTEST = 1e-6
# A plan has one name for the formats of 8 bits, which are equally fast, and one for their blocks.
FLOAT8, BLOCKS = "float8", "mxfp8"
# Message -> how often its bytes pass a link in a ring of very many processes. The bytes are those
# of its larger side.
_PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}


class Rates:
    """How long operators and messages of a process take.

    Args:
        speed: of the machine.
        mesh: resolved. It tells which axes cross hosts: neighbors on the last axis have consecutive
            ranks, and consecutive ranks are on the same host.
        optimizer_on_host: whether the optimizer runs in host memory (`shard.offload`).
        posts_sums: whether sums over copies of the model are posted in a backward pass and awaited
            after it, as they are without FSDP2.
        splits_backward: whether the schedule does, so that every message over tp is awaited at
            once. Only for work of another schedule.
    """

    def __init__(
        self,
        speed: SpeedConfig,
        mesh: MeshPlan,
        *,
        optimizer_on_host: bool = False,
        posts_sums: bool = False,
        splits_backward: bool = False,
    ) -> None:
        self.is_asynchronous, self.posts_sums = speed.is_asynchronous, posts_sums
        self._splits_backward = splits_backward
        self._speed, self._on_host = speed, optimizer_on_host
        self.fsdp_axis = mesh.fsdp_axis
        self._fsdp_axes = {fsdp_axis_of(mesh.degrees, axes) for axes in (FSDP_AXES, EXPERT_FSDP_AXES)}
        self._groups = {axis: _Group(mesh, axis, speed) for axis in {*AXES, *self._fsdp_axes, STAGE}}
        self._seconds: dict[tuple[Work, bool], float] = {}

    def compute_seconds(self, work: Counter[Work], *, in_optimizer: bool = False) -> float:
        """Return the seconds of operators that run one after the other.

        Args:
            work: how often each kind of operator runs.
            in_optimizer: whether they belong to the update of the parameters.
        """
        on_host = in_optimizer and self._on_host
        # Matrices that the optimizer multiplies are on the device.
        device = sum(
            self._operator_seconds(kind, on_host=on_host and not kind.flops) * number for kind, number in work.items()
        )
        hooks = sum(number for kind, number in work.items() if kind.name == HOOK)
        host = self._speed.operator_seconds * sum(work.values()) + self._speed.hook_seconds * hooks
        return max(device, host) if self.is_asynchronous else device + host

    def message_seconds(self, message: Work, *, is_posted: bool = False) -> float:
        """Return the seconds of a collective, or of a message to a neighbor on its axis.

        Args:
            message: its operator, bytes and axis.
            is_posted: whether it is a sum that a CPU posts and awaits later.
        """
        group = self._groups.get(message.axis or "")
        if group is None or group.size == 1:
            return 0.0
        name, num_bytes = message_kind(message.name), message.num_bytes
        measured = self._speed.messages.get(name, {})
        if is_posted and name == "all_reduce":
            measured = self._speed.messages.get(POSTED, measured)
        if not group.crosses_hosts and (points := _nearest(measured, group.size)):
            return interpolate(points, num_bytes)
        seconds = group.ring_seconds(name, num_bytes)
        if self._on_host and message.axis in self._fsdp_axes and name in ("all_gather", "reduce_scatter"):
            # Each process copies its part from host memory before, or to it afterwards.
            seconds += num_bytes / group.size / (self._speed.host_link_gb_per_second * GB)
        return seconds

    def sent_seconds(self, sent: Sent, *, is_posted: bool = False) -> tuple[float, float]:
        """Return how long a message travels, and how long a process does nothing else.

        On a machine that is not asynchronous, both are the same.

        Args:
            sent: the message, and what is computed meanwhile.
            is_posted: whether it is awaited after the pass.
        """
        meanwhile = None if self._splits_backward else sent.meanwhile
        seconds = self.message_seconds(sent.message, is_posted=is_posted or meanwhile is not None)
        if meanwhile is None or not self.is_asynchronous:
            return seconds, seconds
        return seconds, max(0.0, seconds - self.compute_seconds(meanwhile))

    def seconds_of(self, items: Sequence[Counter[Work] | Work]) -> float:
        """Return the seconds of what is sent and computed in a row."""
        return sum(
            self.sent_seconds(it)[1] if isinstance(it, Sent) else self.compute_seconds(it)
            for it in sent_and_computed(items)
        )

    def border_seconds(self, num_bytes: int) -> float:
        """Return the seconds of a message between neighboring stages."""
        return self.message_seconds(Work("send", None, 0, num_bytes, "pp"))

    def _operator_seconds(self, kind: Work, *, on_host: bool) -> float:
        key = kind, on_host
        if key not in self._seconds:
            self._seconds[key] = self._host_seconds(kind) if on_host else self._device_seconds(kind)
        return self._seconds[key]

    def _host_seconds(self, kind: Work) -> float:
        return kind.num_bytes / (self._speed.host_memory_gb_per_second * GB)

    def _device_seconds(self, kind: Work) -> float:
        speed = self._speed
        points = speed.operators.get(operator_key(kind))
        if points is not None:
            return interpolate(points, operator_size(kind))
        if kind.num_bytes == 0:
            return 0.0
        memory = kind.num_bytes / (interpolate(speed.memory_gb_per_second, kind.num_bytes, is_time=False) * GB)
        if kind.flops == 0:
            return memory
        curve = speed.attention_efficiency if ATTENTION in kind.name else speed.matmul_efficiency
        rate = self.peak_tflops(dtype_name(kind)) * TERA * interpolate(curve, kind.flops, is_time=False)
        return max(kind.flops / rate, memory)

    def peak_tflops(self, dtype: str) -> float:
        """Return the highest rate in a number format; if it is not known, that of the slowest."""
        return self._speed.peak_tflops.get(dtype, min(self._speed.peak_tflops.values()))


class _Group:
    """The processes along an axis, or along several that are joined."""

    def __init__(self, mesh: MeshPlan, axis: str, speed: SpeedConfig) -> None:
        axes = axes_named(axis)
        stride = mesh.degree(*AXES[AXES.index(axes[-1]) + 1 :])
        self.size = mesh.degree(*axes)
        self.crosses_hosts = stride * self.size > speed.processes_per_host
        on_host = max(1, min(self.size, speed.processes_per_host // stride))
        within, between = speed.within_host, speed.between_hosts
        self._link = within
        if self.crosses_hosts:
            # The messages of a ring leave a host through the network cards of all its members.
            rate = min(within.gb_per_second, between.gb_per_second * on_host)
            self._link = LinkConfig(gb_per_second=rate, seconds=between.seconds)

    def ring_seconds(self, name: str, num_bytes: int) -> float:
        """Return the seconds of a message by its bytes, the bandwidth and the latency."""
        rate = self._link.gb_per_second * GB
        if name not in _PASSES:
            return self._link.seconds + num_bytes / rate
        hops = 2 * math.ceil(math.log2(self.size)) if name == "all_reduce" else self.size - 1
        return hops * self._link.seconds + _PASSES[name] * num_bytes * (self.size - 1) / self.size / rate


def operator_key(kind: Work) -> str:
    """Return the name of an operator in the description of a machine."""
    return f"{kind.name} {dtype_name(kind)}"


def operator_size(kind: Work) -> int:
    """Return what the time of an operator depends on: its operations, or else its bytes."""
    return kind.flops or kind.num_bytes


def dtype_name(kind: Work) -> str:
    """Return the number format of an operator as a plan names it."""
    if kind.dtype == BLOCK_SCALES:
        return BLOCKS
    name = str(kind.dtype).removeprefix("torch.")
    return FLOAT8 if name.startswith(FLOAT8) else name


def _nearest(curves: Mapping[str, Sequence[tuple[float, float]]], size: int) -> Sequence[tuple[float, float]]:
    """Return the curve for a number of processes: that of the nearest measured number."""
    if not curves:
        return ()
    return curves[min(curves, key=lambda measured: abs(math.log(int(measured) / size)))]


def interpolate(points: Sequence[tuple[float, float]], x: float, *, is_time: bool = True) -> float:
    """Return the value of a curve at a point.

    Args:
        points: ascending.
        x: positive.
        is_time: whether the values are seconds. Beyond both ends they are in proportion to x, but
            no operator is faster than `FASTEST`. Otherwise the values stay at both ends.
    """
    begin, first = points[0]
    if x <= begin:
        return max(FASTEST, first * x / begin) if is_time else first
    end, last = points[-1]
    if x >= end:
        return last * x / end if is_time else last
    index = bisect_left(points, (x,))
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    share = math.log(x / x0) / math.log(x1 / x0)
    return y0 * (y1 / y0) ** share
