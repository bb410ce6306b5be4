"""Measure the machine at hand, and write its description."""

import math
import os
import platform
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshtrain import console
from meshtrain.compat.operators_seen import HOOK
from meshtrain.config.batch_ramp import NO_RAMP
from meshtrain.config.machine import MachineConfig, SpeedConfig
from meshtrain.config.run import RunConfig
from meshtrain.config.toml import dump_toml
from meshtrain.data.cache import write_atomically
from meshtrain.planning.calibration.calls import Call, record_calls
from meshtrain.planning.calibration.messages import link_between_hosts, link_of, measure_messages
from meshtrain.planning.calibration.operators import (
    Point,
    measure_attention,
    measure_memory,
    measure_operators,
    measure_products,
    seconds_of,
)
from meshtrain.planning.calibration.overhead import host_overhead
from meshtrain.planning.machine import GIB
from meshtrain.planning.needs import simulated_run
from meshtrain.planning.simulation.rank import simulate_rank
from meshtrain.planning.simulation.recorder import Work
from meshtrain.planning.simulation.run import SimulatedRun
from meshtrain.planning.speed.rates import Rates
from meshtrain.runtime.agreement import is_first_rank
from meshtrain.runtime.environment import local_world_size_from_environment, world_size_from_environment
from meshtrain.runtime.process import check_devices, process_group
from meshtrain.training.resolve import resolve_run

# Measured if no run is given, on a GPU at sizes that keep it busy: the hidden size of a model of
# each kind, the sequences of a microbatch and the tokens of a sequence.
_HIDDEN = {"cpu": 512, "cuda": 2048}
_BATCHES = {"cpu": ((1, 128), (2, 256), (4, 512)), "cuda": ((1, 512), (2, 1024), (4, 2048))}
# Hidden size and tokens of the runs that show what the host takes. A GPU then waits for the host.
# On a CPU the operators are large enough to evict what the host uses from the caches.
_TINY = {"cpu": (128, 64), "cuda": (32, 16)}
_WIDTHS = {"cpu": (64, 128, 256, 512, 1024), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192)}
_LENGTHS = {"cpu": (128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
# A CPU has no instructions for float16.
_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float32, torch.bfloat16, torch.float16)}


class TinyRun(NamedTuple):
    """A run that shows what the host takes.

    Attributes:
        run: with small operators. On a GPU, the host determines how long they take.
        work: of its step.
    """

    run: SimulatedRun
    work: Counter[Work]


@dataclass(frozen=True)
class Workload:
    """What is measured.

    Attributes:
        calls: of operators.
        tiny: a run that shows what operators cost besides their work.
        tiny_sharded: a run that shows what the hooks of FSDP2 cost besides their operators.
    """

    calls: list[Call]
    tiny: TinyRun
    tiny_sharded: TinyRun


def calibrate(file: Path, config: RunConfig | None) -> None:
    """Measure this machine with all processes that torchrun has started, and write a description.

    Args:
        file: to write.
        config: a run whose operators are measured at their shapes; None: those of small models.

    Raises:
        UserError: for a contradiction in the run.
    """
    check_devices()
    workload = _workload(config)
    with process_group() as device:
        console.line(f"Measuring {len(workload.calls)} operators and the messages of {dist.get_world_size()} processes")
        machine = _measure(workload, device)
        if is_first_rank():
            write_atomically(file, f"# Written by meshtrain calibrate.\n{dump_toml(machine)}")
    console.line(f"Wrote {file}")


def _workload(config: RunConfig | None) -> Workload:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs = _other_runs(device) if config is None else [_of_run(config, size) for size in (1, config.micro_batch_size)]
    number = world_size_from_environment()
    # On one process, FSDP2 has work only if it converts number formats.
    sharded = _tiny(device, {"dp_shard": number}, "float32" if number > 1 else "bfloat16")
    tiny = _tiny(device, {"dp_replicate": number}, "float32")
    return Workload(record_calls([tiny.run, sharded.run, *runs]), tiny, sharded)


def _tiny(device: str, mesh: dict[str, int], compute: str) -> TinyRun:
    hidden, length = _TINY[device]
    llama = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_attention_heads": 2, "num_hidden_layers": 8}
    run = _simulated({"type": "llama", "config": llama | {"vocab_size": 300}}, 1, length, mesh, compute)
    return TinyRun(run, simulate_rank(run, 0).work())


def _of_run(config: RunConfig, micro_batch_size: int) -> SimulatedRun:
    resolved = resolve_run(config)
    number = resolved.batch.global_batch_size // resolved.batch.micro_batch_size
    update = {
        "micro_batch_size": micro_batch_size,
        "global_batch_size": number * micro_batch_size,
        "batch_ramp": NO_RAMP,
    }
    return simulated_run(resolve_run(config.model_copy(update=update)), on_gpus=torch.cuda.is_available())


def _other_runs(device: str) -> list[SimulatedRun]:
    return [
        _simulated({"type": name, "config": config}, rows, length, {"dp_shard": 1}, compute)
        for name, config in _models(_HIDDEN[device], _BATCHES[device][-1][1]).items()
        for rows, length in _BATCHES[device]
        for compute in ("float32", "bfloat16")
    ]


def _models(hidden: int, length: int) -> dict[str, dict[str, int]]:
    heads, vocabulary = hidden // 64, 16 * hidden
    llama = {"hidden_size": hidden, "intermediate_size": 11 * hidden // 4, "num_attention_heads": heads}
    return {
        "llama": llama | {"vocab_size": vocabulary, "num_hidden_layers": 1, "max_position_embeddings": length},
        "gpt2": {"vocab_size": vocabulary, "n_layer": 1, "n_embd": hidden, "n_head": heads, "n_positions": length},
    }


def _simulated(
    model: dict[str, Any], rows: int, length: int, mesh: dict[str, int], compute: str = "float32"
) -> SimulatedRun:
    config = RunConfig.model_validate(
        {
            "run_directory": "calibration",
            "steps": 1,
            "global_batch_size": 4 * rows * math.prod(mesh.values()),
            "micro_batch_size": rows,
            "model": model,
            "data": {"sequence_length": length, "tokenizer": {"vocab_size": 300}},
            "optimizer": {"learning_rate": 1e-3},
            "plan": {"mesh": {"dp_shard": 1} | mesh, "precision": {"compute": compute}},
        }
    )
    return simulated_run(resolve_run(config, math.prod(mesh.values())), on_gpus=torch.cuda.is_available())


def _measure(workload: Workload, device: torch.device) -> MachineConfig:
    """Return the description of this machine. Collective."""
    operators, others = measure_operators(workload.calls, device)
    for key, reason in others.items():
        console.line(f"Not measured, so its bytes will tell its time: {key} ({reason})")
    products = {dtype: measure_products(dtype, device, _WIDTHS[device.type]) for dtype in _DTYPES[device.type]}
    best = "float32" if device.type == "cpu" else "bfloat16"
    attention = measure_attention(getattr(torch, best), device, _LENGTHS[device.type])
    messages, copies = measure_messages(device), _copies(device)
    peaks = {str(dtype).removeprefix("torch."): max(rate for _, rate in points) for dtype, points in products.items()}
    speed = SpeedConfig(
        processes_per_host=local_world_size_from_environment(),
        is_asynchronous=device.type == "cuda",
        operator_seconds=0.0,
        hook_seconds=0.0,
        peak_tflops=peaks,
        matmul_efficiency=_relative(products[getattr(torch, best)], peaks[best]),
        attention_efficiency=_relative(attention, peaks[best]),
        memory_gb_per_second=measure_memory(device),
        within_host=link_of(messages["send"].get("2", copies)),
        between_hosts=link_of(copies) if dist.get_world_size() == 1 else link_between_hosts(device),
        host_memory_gb_per_second=max(rate for _, rate in measure_memory(torch.device("cpu"))),
        host_link_gb_per_second=link_of(copies).gb_per_second,
        operators=operators,
        messages=messages,
    )
    for name, tiny, counts in (
        ("operator_seconds", workload.tiny, _is_computed),
        ("hook_seconds", workload.tiny_sharded, _is_hook),
    ):
        number = sum(number for work, number in tiny.work.items() if counts(work))
        overhead = host_overhead(tiny.run, device, _known_seconds(tiny, speed), number)
        speed = speed.model_copy(update={name: overhead})
    return _described(speed, device)


def _is_computed(work: Work) -> bool:
    return work.axis is None


def _is_hook(work: Work) -> bool:
    return work.name == HOOK


def _known_seconds(tiny: TinyRun, speed: SpeedConfig) -> float:
    rates = Rates(speed, tiny.run.plan.mesh)
    computed = Counter({work: number for work, number in tiny.work.items() if _is_computed(work)})
    sent = sum(rates.message_seconds(work) * number for work, number in tiny.work.items() if not _is_computed(work))
    seconds = rates.compute_seconds(computed)
    # On a GPU, messages travel while the host goes on.
    return max(seconds, sent) if speed.is_asynchronous else seconds + sent


def _copies(device: torch.device) -> list[Point]:
    """Return points [bytes, seconds] of copies from host memory to the device."""
    points = []
    for exponent in (16, 20, 24):
        host = torch.ones(2**exponent, dtype=torch.uint8, pin_memory=device.type == "cuda")
        seconds = seconds_of(lambda: torch.empty_like(host, device=device).copy_(host), device)  # noqa: B023 - at once
        points.append((float(2**exponent), seconds))
    return points


def _relative(points: list[Point], peak: float) -> list[Point]:
    return [(flops, rate / peak) for flops, rate in points]


def _described(speed: SpeedConfig, device: torch.device) -> MachineConfig:
    is_gpu = device.type == "cuda"
    world_size, hosts = dist.get_world_size(), dist.get_world_size() // local_world_size_from_environment()
    described = MachineConfig(
        memory_gib=_memory_bytes(device) / GIB,
        reserved_gib=2.0 if is_gpu else 0.0,
        fragmentation=0.05 if is_gpu else 0.0,
        source=f"meshtrain calibrate with {world_size} processes on {_machine_name(device)}",
        speed=speed,
    )
    guessed = {"reserved_gib", "fragmentation"} if is_gpu else set()
    guessed |= {"speed.within_host"} if local_world_size_from_environment() == 1 else set()
    guessed |= {"speed.between_hosts"} if hosts == 1 else set()
    measured = [name for name in described.constants() if name not in guessed]
    return described.model_copy(update={"measured": measured, "sources": dict.fromkeys(sorted(guessed), "assumed")})


def _memory_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / local_world_size_from_environment()


def _machine_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"a CPU ({platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads a process)"
