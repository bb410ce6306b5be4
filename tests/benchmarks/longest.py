"""Find the longest sequence that a process has memory for, without and with parts of it over cp.

    python -m tests.benchmarks.longest [--gib 4] [--cp 1 2 4] [--measure]

A Llama with 4 layers, a hidden size of 512 and a vocabulary of 8,000 trains on one sequence, in
float32, with head and loss in chunks of 512 tokens. The length is found by the simulation of
`meshtrain plan`, in steps of 256 tokens. With --measure a step of that length is then run, and the
memory that belongs to the fullest process alone (RssAnon) is measured, above the level before the
model is built.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from meshtrain.config.run import RunConfig
from meshtrain.planning.assembly.pipeline import simulate
from meshtrain.planning.calibration.overhead import build_real
from meshtrain.planning.memory import memory_use
from meshtrain.planning.needs import simulated_run
from meshtrain.planning.simulation.run import SimulatedRun
from meshtrain.training.resolve import resolve_run
from meshtrain.training.step import train_step
from tests.allocator import return_freed_memory
from tests.benchmarks.loading_weights import GIB, AnonymousPeak, status_bytes
from tests.ranks import run_on_ranks

UNIT = 256
SHAPE: dict[str, Any] = {
    "vocab_size": 8_000,
    "hidden_size": 512,
    "intermediate_size": 1_376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2**20,
}
SMALL = {**SHAPE, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


def make_run(shape: dict[str, Any], length: int, cp: int) -> SimulatedRun:
    """Return a run of one sequence, which is not started."""
    config = RunConfig.model_validate(
        {
            "run_directory": "longest",
            "steps": 1,
            "global_batch_size": 1,
            "model": {"type": "llama", "config": shape},
            "data": {"sequence_length": length, "tokenizer": {"vocab_size": shape["vocab_size"]}},
            "plan": {"mesh": {"dp_shard": 1, "cp": cp}, "loss": {"chunk_tokens": 512}},
        }
    )
    return simulated_run(resolve_run(config, cp), on_gpus=False)


def peak_bytes(run: SimulatedRun) -> int:
    """Return the predicted memory of the fullest process."""
    return max(memory_use(group.profile).peak_bytes for group in simulate(run).groups)


def longest(fits: Callable[[int], bool]) -> int:
    """Return the largest number of units that fits."""
    most = 1
    while fits(2 * most):
        most *= 2
    step = most
    while (step := step // 2) > 0:
        if fits(most + step):
            most += step
    return most


def measure(run: SimulatedRun) -> int:
    """Return the memory of this process in a step."""
    torch.set_num_threads(1)
    return_freed_memory()
    before, sampler = status_bytes("RssAnon"), AnonymousPeak()
    sampler.start()
    context, batch = build_real(run, torch.device("cpu"))
    train_step(context, 0, batch, np.arange(1))
    time.sleep(0.05)
    return sampler.peak - before


def main() -> None:
    """Print one line per number of processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--cp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that the benchmark works")
    options = parser.parse_args()
    shape, limit = SMALL if options.small else SHAPE, options.gib * GIB
    first = None
    for cp in options.cp:
        length = UNIT * longest(lambda units, cp=cp: peak_bytes(make_run(shape, UNIT * units, cp)) <= limit)
        first = first or length
        run = make_run(shape, length, cp)
        words = [
            f"cp {cp}: {length:,} tokens, {length / first:.2f} times as many as the first",
            f"predicted {peak_bytes(run) / GIB:.2f} GiB",
        ]
        if options.measure:
            words.append(f"measured {max(run_on_ranks(cp, measure, run, timeout=3600.0)) / GIB:.2f} GiB")
        print(", ".join(words), flush=True)


if __name__ == "__main__":
    main()
