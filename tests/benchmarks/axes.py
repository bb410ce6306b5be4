"""Measure a training step with one axis of the mesh, beside the same step with another.

    python -m tests.benchmarks.axes [--repeat 5] [--only NAME ...]

context: two sequences of 4,096 tokens. cp 2 computes half of each, dp_shard 2 one of them.
experts: 8 experts, 2 for each token. ep 2 sends tokens to the experts (all-to-all), and the style
    `expert` of tp 2 sums what the experts of each process add to all tokens (all-reduce). Both
    sides train the same 8 sequences of 512 tokens.

Both sides live in the same two processes, in float32, and take turns step by step. The ratio is
that of the seconds of a pair of steps, and below 1 if the first side is faster.
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshtrain.config.run import RunConfig
from meshtrain.planning.calibration.overhead import build_real
from meshtrain.planning.needs import simulated_run
from meshtrain.planning.simulation.run import SimulatedRun
from meshtrain.training.resolve import resolve_run
from meshtrain.training.step import train_step
from tests.ranks import run_on_ranks

_SHAPE = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
LLAMA: dict[str, Any] = {
    "type": "llama",
    "config": {**_SHAPE, "intermediate_size": 1_376, "max_position_embeddings": 4_096},
}
MIXTRAL: dict[str, Any] = {"type": "mixtral", "config": {**_SHAPE, "intermediate_size": 688, "num_local_experts": 8}}
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
# Name -> model, sequences of a step, their length, and the plans of both sides.
PAIRS: dict[str, tuple[dict[str, Any], int, int, dict[str, dict[str, Any]]]] = {
    "context": (LLAMA, 2, 4_096, {"cp 2": {"mesh": {"dp_shard": 1, "cp": 2}}, "dp_shard 2": {"mesh": {"dp_shard": 2}}}),
    "experts": (
        MIXTRAL,
        8,
        512,
        {
            "ep 2": {"mesh": {"dp_shard": 1, "ep": 2}},
            "tp 2, whole experts": {"mesh": {"dp_shard": 1, "tp": 2}, "tensor": {"experts": "expert"}},
        },
    ),
}


def make_run(model: dict[str, Any], rows: int, length: int, plan: dict[str, Any]) -> SimulatedRun:
    """Return a run of a model, which is not started."""
    config = RunConfig.model_validate(
        {
            "run_directory": "axes",
            "steps": 1,
            "global_batch_size": rows,
            "model": {**model, "config": {**model["config"], "vocab_size": 8_000}},
            "data": {"sequence_length": length, "tokenizer": {"vocab_size": 8_000}},
            "plan": plan,
        }
    )
    return simulated_run(resolve_run(config, 2), on_gpus=False)


def take_turns(runs: list[SimulatedRun], repeat: int) -> list[list[float]]:
    """Return the seconds of both sides in each round, after one step each."""
    torch.set_num_threads(1)
    sides = [build_real(run, torch.device("cpu")) for run in runs]
    rounds = []
    for number in range(repeat + 1):
        seconds = [0.0, 0.0]
        # The order alternates, because the second step finds the memory that the first has freed.
        for side in (0, 1) if number % 2 else (1, 0):
            context, batch = sides[side]
            dist.barrier()
            begin = time.perf_counter()
            train_step(context, number, batch, np.arange(runs[side].batch.global_batch_size))
            dist.barrier()
            seconds[side] = time.perf_counter() - begin
        rounds.append(seconds)
    return rounds[1:]


def main() -> None:
    """Print one line per pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", choices=list(PAIRS), nargs="+", default=list(PAIRS))
    parser.add_argument("--small", action="store_true", help="tiny models, to see that the benchmark works")
    options = parser.parse_args()
    for name in options.only:
        model, rows, length, plans = PAIRS[name]
        if options.small:
            model, length = {**model, "config": {**model["config"], **SMALL}}, 32
        runs = [make_run(model, rows, length, plan) for plan in plans.values()]
        rounds = run_on_ranks(2, take_turns, runs, options.repeat, timeout=3600.0)[0]
        sides = [
            f"{side} {statistics.median(it):.2f} s" for side, it in zip(plans, zip(*rounds, strict=True), strict=True)
        ]
        ratios = sorted(first / second for first, second in rounds)
        print(f"{name}: {' / '.join(sides)} = {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


if __name__ == "__main__":
    main()
