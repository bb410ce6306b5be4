"""Measure a training step with each optimizer, beside AdamW.

python -m tests.benchmarks.optimizers [--repeat 5] [--tokens 512 2048 8192] [--ranks 1]

A Llama with four layers and a hidden size of 512 trains in float32, on one thread of each process.
With several ranks, parameters are sharded over them. For each number of tokens in a step, all
optimizers live in one process and take turns. The ratios are medians over the rounds.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import torch

from meshtrain.config.families import with_family
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.optimizer import LearningRateConfig, OptimizerConfig, OptimizerName
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.run import ModelConfig
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.runtime.mesh import data_rank, init_mesh
from meshtrain.training.loss import build_loss
from meshtrain.training.loss_scale import build_loss_scale
from meshtrain.training.optim import build_learning_rate, build_optimizer
from meshtrain.training.step import StepContext, train_step
from tests.benchmarks.rounds import alternate
from tests.ranks import run_on_ranks

SHAPE: dict[str, Any] = {
    "vocab_size": 4_096,
    "hidden_size": 512,
    "intermediate_size": 1_376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
SMALL = {**SHAPE, "hidden_size": 64, "intermediate_size": 128}
LENGTH = 256
NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)
Seconds = tuple[float, float]
"""Of a whole step, and of its optimizer."""


def build_step(shape: dict[str, Any], num_tokens: int, ranks: int, name: OptimizerName) -> Callable[[], Seconds]:
    """Return a function that takes a step."""
    config = load_hf_config(ModelConfig(type="llama", config={**shape, "max_position_embeddings": LENGTH}))
    model = build_meta_model(config, dtype=torch.float32)
    plan = with_family(ParallelPlan(mesh=MeshPlan(dp_shard=ranks)), "llama")
    rows = num_tokens // LENGTH
    plan = resolve_plan(plan, model, BatchShape(rows, 1, LENGTH), ranks)
    mesh = init_mesh(plan.mesh, "cpu")
    pipeline = build_pipeline(model, mesh, plan, micro_batch_size=1, seed=0, device=torch.device("cpu"))
    pipeline.initialize(0)
    optimizer = OptimizerConfig(name=name, learning_rate=1e-4)
    context = StepContext(
        pipeline=pipeline,
        loss=build_loss(pipeline),
        optimizer=build_optimizer(pipeline, optimizer),
        learning_rate=build_learning_rate(LearningRateConfig(name="constant"), optimizer.learning_rate, 100),
        max_gradient_norm=1.0,
        loss_scale=build_loss_scale(plan.precision),
    )
    generator = torch.Generator().manual_seed(data_rank(mesh))
    ids = torch.randint(0, shape["vocab_size"], (rows // ranks, LENGTH + 1), generator=generator)
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}

    def step() -> Seconds:
        result = train_step(context, 0, batch, np.arange(rows))
        return result.forward_backward_seconds + result.optimizer_seconds, result.optimizer_seconds

    return step


def measure(shape: dict[str, Any], num_tokens: int, ranks: int, repeat: int) -> list[list[Seconds]]:
    """Return the seconds of every optimizer in each round, after one step each."""
    return alternate([build_step(shape, num_tokens, ranks, name) for name in NAMES], repeat)


def main() -> None:
    """Print one line for each number of tokens and optimizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2_048, 8_192])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="a narrow model, to see that the benchmark works")
    options = parser.parse_args()
    shape = SMALL if options.small else SHAPE
    print(f"{'tokens':>8}{'optimizer':>21}{'step s':>9}{'update s':>10}{'step / adamw':>14}")
    for tokens in options.tokens:
        arguments = shape, tokens, options.ranks, options.repeat
        rounds = run_on_ranks(options.ranks, measure, *arguments, timeout=3600.0)[0]
        usual = NAMES.index("adamw")
        for index, name in enumerate(NAMES):
            step, update = (statistics.median(found[index][which] for found in rounds) for which in (0, 1))
            ratio = statistics.median(found[index][0] / found[usual][0] for found in rounds)
            print(f"{tokens:>8,}{name:>21}{step:>9.3f}{update:>10.4f}{ratio:>14.3f}", flush=True)


if __name__ == "__main__":
    main()
