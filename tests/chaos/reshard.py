"""Save on one mesh, load and save on another, load on the first, and compare all bits.

python -m tests.chaos.reshard [--pairs 30] [--seed 0]

Pairs of meshes of up to 8 ranks are drawn: pp, dp_replicate, dp_shard and tp all change at once
where possible, with tied and untied models, V-shaped and interleaved schedules. Weights, AdamW's
moments and step counts are compared as files: both the save of the second mesh and that of the
return must equal the first.
"""

import argparse
import random
import tempfile
from pathlib import Path

import numpy as np
import torch

from meshtrain.checkpoint.dcp.store import write_checkpoint
from meshtrain.checkpoint.storage.publishing import Retention
from meshtrain.models.initialize import restore_buffers
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.training.state import load_state, saved_tensors
from meshtrain.training.step import StepContext, train_step
from meshtrain.verify.parallel import build_step_context, local_rows
from tests.checkpoint.stages import manifest_of
from tests.parity import GLOBAL_BATCH, Case, batches, build
from tests.ranks import run_on_ranks
from tests.training.runs import read_checkpoint

MODELS = ("gpt2-tied", "llama-untied", "qwen3", "gpt2-odd")
DEGREES = ((1, 2, 4), (1, 2), (1, 2, 4), (1, 2, 4))
SCHEDULES = (("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2), ("GPipe", 1))


def draw_case(model: str, stream: random.Random, most_ranks: int) -> Case:
    """Return a mesh of 2 to `most_ranks` ranks, with a schedule if it has stages."""
    while True:
        mesh = tuple(stream.choice(degrees) for degrees in DEGREES)
        if 2 <= np.prod(mesh) <= most_ranks:
            break
    pp = mesh[0]
    schedule, stages = stream.choice(SCHEDULES) if pp == 2 else ("1F1B", 1)
    return Case(model, mesh, schedule=schedule, stages_per_rank=stages)  # type: ignore[arg-type]


def save(pipeline: Pipeline, context: StepContext, root: Path) -> None:
    """Save weights and optimizer state."""
    tensors = saved_tensors(pipeline, context.optimizer)
    write_checkpoint(root, tensors, manifest=manifest_of(1), huggingface=None, retention=Retention(newest=1))


def begin(case: Case, root: Path) -> None:
    """Train a step on a mesh, so that there are moments, and save."""
    pipeline = build(case)
    pipeline.initialize(0)
    context = build_step_context(pipeline)
    train_step(context, 0, local_rows(pipeline, batches()[0]), np.arange(GLOBAL_BATCH))
    save(pipeline, context, root)


def travel(case: Case, origin: Path, root: Path) -> None:
    """Load on a mesh what another one has saved, and save it."""
    pipeline = build(case)
    for stage in pipeline.stages:
        restore_buffers(stage.model)
    context = build_step_context(pipeline)
    load_state(origin / "step-1", pipeline, context.optimizer)
    save(pipeline, context, root)


def round_trip(first: Case, second: Case, directory: Path) -> tuple[int, int]:
    """Return the number of tensors with equal bits after both loads, and the number of all."""
    home, away, back = (directory / name for name in ("home", "away", "back"))
    run_on_ranks(first.world_size, begin, first, home)
    run_on_ranks(second.world_size, travel, second, home, away)
    run_on_ranks(first.world_size, travel, first, away, back)
    wanted, there, returned = (read_checkpoint(root) for root in (home, away, back))
    assert wanted.keys() == there.keys() == returned.keys()
    same = [torch.equal(wanted[key], there[key]) and torch.equal(wanted[key], returned[key]) for key in wanted]
    return sum(same), len(same)


def words(case: Case) -> str:
    """Return a mesh as `2 x 1 x 2 x 1, ZBVZeroBubble`."""
    return " x ".join(map(str, case.mesh)) + (f", {case.schedule}" if case.mesh[0] > 1 else "")


def main() -> None:
    """Print a line for each pair, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-ranks", type=int, default=8)
    options = parser.parse_args()
    stream = random.Random(options.seed)
    num_whole = 0
    for number in range(options.pairs):
        model = MODELS[number % len(MODELS)]
        first, second = (draw_case(model, stream, options.most_ranks) for _ in range(2))
        with tempfile.TemporaryDirectory() as directory:
            same, every = round_trip(first, second, Path(directory))
        num_whole += same == every
        print(
            f"{number + 1:3}  {model:14}{words(first):34}->  {words(second):34}{same} of {every} the same", flush=True
        )
    print(f"{num_whole} of {options.pairs} pairs (pp x dp_replicate x dp_shard x tp) bit-equal after the round trip")


if __name__ == "__main__":
    main()
