"""Measure tokens per second of meshtrain's step relative to a hand-written loop.

python -m tests.benchmarks.throughput [--steps 6] [--layout "tp 2"] [--compile]

Both sides live in the same processes and take turns, step by step, so that a slow moment of the
machine affects both. The side that is built first gets other memory, in which the same operators
take about half a percent less. So half of the pairs come from processes in which the other side is
built first.
"""

import argparse
import statistics
import time
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from meshtrain.config.families import with_family
from meshtrain.config.mesh import DATA_AXES, MeshPlan
from meshtrain.config.optimizer import LearningRateConfig, OptimizerConfig
from meshtrain.config.plan import CompilePlan, ParallelPlan, PipelinePlan
from meshtrain.config.run import ModelConfig
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.runtime.mesh import axis_size, data_rank, init_mesh
from meshtrain.training.loss import build_loss
from meshtrain.training.optim import build_learning_rate, build_optimizer
from meshtrain.training.step import StepContext, train_step
from tests.benchmarks.bare import COMPILE, CONFIG, LAYOUTS, MICRO_BATCH, SMALL, Step
from tests.ranks import run_on_ranks

GLOBAL_BATCH, SEQUENCE = 8, 512


def build_step_context(degrees: dict[str, int]) -> StepContext:
    """Build the step context with which meshtrain trains in a layout."""
    config = load_hf_config(ModelConfig(type="llama", config=CONFIG))
    model = build_meta_model(config, dtype=torch.float32)
    plan = ParallelPlan(
        mesh=MeshPlan(**degrees),
        pipeline=PipelinePlan(layers_per_stage="even"),
        compile=CompilePlan(enabled=COMPILE["layers"]),
    )
    batch = BatchShape(GLOBAL_BATCH, MICRO_BATCH, SEQUENCE)
    plan = resolve_plan(with_family(plan, "llama"), model, batch, dist.get_world_size())
    mesh = init_mesh(plan.mesh, "cpu")
    pipeline = build_pipeline(model, mesh, plan, micro_batch_size=MICRO_BATCH, seed=0, device=torch.device("cpu"))
    pipeline.initialize(0)
    return StepContext(
        pipeline=pipeline,
        loss=build_loss(pipeline),
        optimizer=build_optimizer(pipeline, OptimizerConfig()),
        learning_rate=build_learning_rate(LearningRateConfig(name="constant"), 3e-4, 1000),
        max_gradient_norm=1.0,
    )


def meshtrain_step(degrees: dict[str, int]) -> Step:
    """Build meshtrain's side of a layout."""
    context = build_step_context(degrees)
    mesh = context.pipeline.mesh
    size = GLOBAL_BATCH // axis_size(mesh, *DATA_AXES)
    rows = slice(data_rank(mesh) * size, (data_rank(mesh) + 1) * size)
    number = 0

    def step(ids: torch.Tensor, labels: torch.Tensor) -> float:
        nonlocal number
        number += 1
        batch = {"input_ids": ids[rows], "labels": labels[rows]}
        return train_step(context, number, batch, np.arange(GLOBAL_BATCH)).loss

    return step


def take_turns(layout: str, steps: int, small: bool, is_compiled: bool, bare_first: bool) -> list[tuple[float, float]]:
    """Return the seconds of each pair of steps (bare, meshtrain), after one pair of warm-up."""
    CONFIG.update(SMALL if small else {})
    COMPILE["layers"] = is_compiled
    build_bare, degrees = LAYOUTS[layout]
    builds = [build_bare, partial(meshtrain_step, degrees)]
    built = {side: builds[side]() for side in ((0, 1) if bare_first else (1, 0))}
    sides = [built[0], built[1]]
    stream = torch.Generator().manual_seed(0)
    pairs = []
    for number in range(steps + 1):
        tokens = torch.randint(0, CONFIG["vocab_size"], (GLOBAL_BATCH, SEQUENCE + 1), generator=stream)
        seconds = [0.0, 0.0]
        # The order alternates, because the second step finds the caches filled by the first.
        for side in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            begin = time.perf_counter()
            sides[side](tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            seconds[side] = time.perf_counter() - begin
        pairs.append((seconds[0], seconds[1]))
    return pairs[1:]


def main() -> None:
    """Print one line per layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="pairs of steps, of which half are in other processes")
    parser.add_argument("--layout", choices=list(LAYOUTS))
    parser.add_argument("--compile", action="store_true", help="compile the decoder layers on both sides")
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that the benchmark works")
    options = parser.parse_args()
    print(
        f"{'layout':16}{'bare tok/s':>12}{'meshtrain':>12}{'ratio':>8}   (medians of {options.steps} interleaved pairs)"
    )
    for layout in [options.layout] if options.layout else LAYOUTS:
        ranks = 1 if layout == "1 rank" else 2
        pairs = []
        for bare_first in (True, False):
            steps = max(1, options.steps // 2)
            asked = layout, steps, options.small, options.compile, bare_first
            pairs += run_on_ranks(ranks, take_turns, *asked, timeout=1200.0)[0]
        bare, ours = (GLOBAL_BATCH * SEQUENCE / statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"{layout:16}{bare:12,.0f}{ours:12,.0f}{ratio:8.3f}", flush=True)


if __name__ == "__main__":
    main()
