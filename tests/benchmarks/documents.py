"""Measure a training step on packed documents: attention to each alone, beside a dense mask.

python -m tests.benchmarks.documents [--repeat 3] [--lengths 2048 4096 8192] [--model llama]

A model with two layers and a hidden size of 512 trains on one sequence of documents of 190 tokens
on average, of lengths as uneven as those of text, in float32 and on one thread. The whole step
counts: forward, backward, gradient norm and AdamW. For each length all variants live in one process
and take turns, and the seconds are those of the CPU. `joined` lets documents see each other.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshtrain.config.families import with_family
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.optimizer import LearningRateConfig, OptimizerConfig
from meshtrain.config.plan import AttentionPlan, ParallelPlan
from meshtrain.config.run import ModelConfig
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.runtime.mesh import init_mesh
from meshtrain.training.loss import build_loss
from meshtrain.training.loss_scale import build_loss_scale
from meshtrain.training.optim import build_learning_rate, build_optimizer
from meshtrain.training.step import StepContext, train_step
from tests.benchmarks.rounds import alternate
from tests.ranks import run_on_ranks

SHAPE: dict[str, Any] = {
    "vocab_size": 1_024,
    "hidden_size": 512,
    "intermediate_size": 1_376,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
SMALL = {**SHAPE, "hidden_size": 64, "intermediate_size": 128}
VARIANTS = ("mask", "segments", "joined")
MEAN_TOKENS = 190
Step = Callable[[], tuple[float, float]]


def packed_positions(length: int, mean: int = MEAN_TOKENS) -> Tensor:
    """Return the (1, seq) positions of packed documents, of exponentially distributed lengths."""
    count = round(length / mean)
    sizes = np.random.default_rng(0).exponential(size=count)
    borders = np.round(np.cumsum(sizes) / sizes.sum() * (length - count)).astype(int)
    lengths = 1 + np.diff(borders, prepend=0)
    return torch.from_numpy(np.concatenate([np.arange(it) for it in lengths])).unsqueeze(0)


def build_step(model_type: str, shape: dict[str, Any], length: int, variant: str) -> Step:
    """Return a function that takes a step, and returns its CPU seconds and its loss."""
    config = load_hf_config(ModelConfig(type=model_type, config={**shape, "max_position_embeddings": length}))
    model = build_meta_model(config, dtype=torch.float32)
    attention = AttentionPlan() if variant == "joined" else AttentionPlan(documents=variant)
    plan = with_family(ParallelPlan(mesh=MeshPlan(dp_shard=1), attention=attention), model_type)
    plan = resolve_plan(plan, model, BatchShape(1, 1, length, separates=variant != "joined"), 1)
    pipeline = build_pipeline(
        model, init_mesh(plan.mesh, "cpu"), plan, micro_batch_size=1, seed=0, device=torch.device("cpu")
    )
    pipeline.initialize(0)
    optimizer = OptimizerConfig(learning_rate=1e-3)
    context = StepContext(
        pipeline=pipeline,
        loss=build_loss(pipeline),
        optimizer=build_optimizer(pipeline, optimizer),
        learning_rate=build_learning_rate(LearningRateConfig(name="constant"), optimizer.learning_rate, 100),
        max_gradient_norm=1.0,
        loss_scale=build_loss_scale(plan.precision),
    )
    ids = torch.randint(0, shape["vocab_size"], (1, length + 1), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    if variant != "joined":
        batch["position_ids"] = packed_positions(length)

    def step() -> tuple[float, float]:
        begin = time.process_time()
        loss = train_step(context, 0, batch, np.arange(1)).loss
        return time.process_time() - begin, loss

    return step


def measure(model_type: str, shape: dict[str, Any], length: int, repeat: int) -> list[list[tuple[float, float]]]:
    """Return CPU seconds and loss of every variant in each round, after one step each."""
    return alternate([build_step(model_type, shape, length, variant) for variant in VARIANTS], repeat)


def main() -> None:
    """Print one line per length: how many times faster than with a dense mask a step is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2_048, 4_096, 8_192])
    parser.add_argument("--model", default="llama")
    parser.add_argument("--small", action="store_true", help="a narrow model, to see that the benchmark works")
    options = parser.parse_args()
    shape = SMALL if options.small else SHAPE
    print(f"{'tokens':>8}{'documents':>11}{'mask s':>9}{'segments':>10}{'joined':>8}{'loss differs by':>17}")
    for length in options.lengths:
        rounds = run_on_ranks(1, measure, options.model, shape, length, options.repeat, timeout=3600.0)[0]
        seconds = statistics.median(found[0][0] for found in rounds)
        ratios = [statistics.median(found[0][0] / found[index][0] for found in rounds) for index in (1, 2)]
        differs = max(abs(found[1][1] / found[0][1] - 1) for found in rounds)
        count = int((packed_positions(length) == 0).sum())
        shown = [f"{ratio:.2f}x" for ratio in ratios]
        print(f"{length:>8,}{count:>11}{seconds:>9.2f}{shown[0]:>10}{shown[1]:>8}{differs:>17.0e}", flush=True)


if __name__ == "__main__":
    main()
