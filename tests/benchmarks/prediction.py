"""Predicted and measured seconds of a step, for many plans, on two processes of this machine.

    python -m tests.benchmarks.prediction [--rounds 3] [--machine FILE] [--only NAME ...]

The machine is calibrated first, unless a description is given. In every round each plan runs once,
one after the other, so that a slow minute of the machine meets all of them. Nothing else should run
on the machine.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from meshtrain.config.run import RunConfig
from meshtrain.config.toml import load_machine
from meshtrain.planning.calibration.overhead import measure_steps
from meshtrain.planning.machine import CPU_GRANULARITY, Machine
from meshtrain.planning.needs import find_needs, simulated_run
from meshtrain.planning.simulation.run import SimulatedRun
from meshtrain.training.resolve import resolve_run
from tests.ranks import run_on_ranks

STEPS = 3
_LLAMA = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
_GPT2 = {"vocab_size": 8000, "n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": 512}
LLAMA: dict[str, Any] = {"type": "llama", "config": _LLAMA}
GPT2: dict[str, Any] = {"type": "gpt2", "config": _GPT2}
_PP = {"pp": 2, "dp_shard": 1}
PLANS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    # name: model, sequences of a microbatch, plan
    "llama, ddp": (LLAMA, 2, {"mesh": {"dp_replicate": 2, "dp_shard": 1}}),
    "llama, ddp, small microbatches": (LLAMA, 1, {"mesh": {"dp_replicate": 2, "dp_shard": 1}}),
    "llama, fsdp": (LLAMA, 2, {"mesh": {"dp_shard": 2}}),
    "llama, fsdp, gathered": (LLAMA, 2, {"mesh": {"dp_shard": 2}, "shard": {"reshard_after_forward": "never"}}),
    "llama, fsdp, level 2": (LLAMA, 1, {"mesh": {"dp_shard": 2}, "shard": {"level": 2}}),
    "llama, fsdp, two layers ahead": (LLAMA, 2, {"mesh": {"dp_shard": 2}, "shard": {"prefetch": 2}}),
    "llama, fsdp, recomputed": (LLAMA, 2, {"mesh": {"dp_shard": 2}, "recompute": {"mode": "full"}}),
    "llama, fsdp, selective": (LLAMA, 1, {"mesh": {"dp_shard": 2}, "recompute": {"mode": "selective"}}),
    "llama, tp": (LLAMA, 2, {"mesh": {"tp": 2, "dp_shard": 1}}),
    "llama, tp, parts of the sequence": (
        LLAMA,
        2,
        {"mesh": {"tp": 2, "dp_shard": 1}, "tensor": {"sequence_parallel": True}},
    ),
    "llama, tp, recomputed": (LLAMA, 4, {"mesh": {"tp": 2, "dp_shard": 1}, "recompute": {"mode": "full"}}),
    "llama, 1F1B": (LLAMA, 1, {"mesh": _PP}),
    "llama, 1F1B, large microbatches": (LLAMA, 2, {"mesh": _PP}),
    "llama, GPipe": (LLAMA, 1, {"mesh": _PP, "pipeline": {"schedule": "GPipe"}}),
    "llama, Interleaved1F1B": (
        LLAMA,
        1,
        {"mesh": _PP, "pipeline": {"schedule": "Interleaved1F1B", "stages_per_rank": 2}},
    ),
    "llama, ZBV": (LLAMA, 1, {"mesh": _PP, "pipeline": {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}}),
    "llama, 1F1B, recomputed": (LLAMA, 1, {"mesh": _PP, "recompute": {"mode": "full"}}),
    "gpt2, ddp": (GPT2, 2, {"mesh": {"dp_replicate": 2, "dp_shard": 1}}),
    "gpt2, fsdp": (GPT2, 2, {"mesh": {"dp_shard": 2}}),
    "gpt2, tp": (GPT2, 2, {"mesh": {"tp": 2, "dp_shard": 1}}),
    "gpt2, 1F1B": (GPT2, 1, {"mesh": _PP}),
    "gpt2, LoopedBFS": (GPT2, 1, {"mesh": _PP, "pipeline": {"schedule": "LoopedBFS", "stages_per_rank": 2}}),
}


SMALL = {
    "llama": {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128},
    "gpt2": {"n_layer": 2, "n_embd": 64},
}


def make_small() -> None:
    """Shrink the models, to see that a benchmark works."""
    for model in (LLAMA, GPT2):
        model["config"].update(SMALL[model["type"]])


def make_run(model: dict[str, Any], rows: int, plan: dict[str, Any]) -> RunConfig:
    """Return a run with 4 sequences a step."""
    return RunConfig.model_validate(
        {
            "run_directory": "prediction",
            "steps": 1,
            "global_batch_size": 4,
            "micro_batch_size": rows,
            "model": model,
            "data": {"sequence_length": 256, "tokenizer": {"vocab_size": 300}},
            "optimizer": {"learning_rate": 1e-3},
            "plan": plan,
        }
    )


def calibrated(folder: Path) -> Path:
    """Measure this machine with two processes, and return its description."""
    file = folder / "machine.toml"
    command = [sys.executable, "-m", "meshtrain", "calibrate", str(file), "--processes", "2"]
    subprocess.run(command, check=True)
    return file


def measured(run: SimulatedRun) -> float:
    """Return the median seconds of a few steps."""
    (seconds, _) = run_on_ranks(2, measure_steps, run, torch.device("cpu"), STEPS, 1)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--small", action="store_true", help="tiny models, to see that the benchmark works")
    arguments = parser.parse_args()
    if arguments.small:
        make_small()
    with TemporaryDirectory() as folder:
        config = load_machine(arguments.machine or calibrated(Path(folder)))
    machine = Machine("this machine", config, CPU_GRANULARITY, is_cpu=True)
    plans = {name: it for name, it in PLANS.items() if not arguments.only or name in arguments.only}
    resolved = {name: resolve_run(make_run(*it), 2) for name, it in plans.items()}
    needs = {name: find_needs(it, machine) for name, it in resolved.items()}
    seconds: dict[str, list[float]] = {name: [] for name in resolved}
    for _ in range(arguments.rounds):
        for name, it in resolved.items():
            seconds[name].append(measured(simulated_run(it, on_gpus=False)))
    deviations = {}
    for name, found in seconds.items():
        median, time = statistics.median(found), needs[name].time
        assert time is not None
        deviations[name] = time.seconds / median - 1
        spread = (max(found) - min(found)) / median
        print(f"{name:36} predicted {time.seconds:.3f} s, measured {median:.3f} s (spread {spread:.0%}): ", end="")
        print(f"{deviations[name]:+.1%}")
    absolute = sorted(map(abs, deviations.values()))
    print(f"{len(absolute)} plans: median {statistics.median(absolute):.1%}, worst {absolute[-1]:.1%}")


if __name__ == "__main__":
    main()
