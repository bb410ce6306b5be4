"""Compare the losses of number formats over many steps with those of bfloat16 in one process.

python -m tests.benchmarks.precision [--steps 200] [--trainings NAME ...] [--small]

A small Llama and a small GPT-2 learn the transitions of a random chain, a new batch in each step.
A row shows the mean loss of the last tenth of the steps, and its ratio to bfloat16 in one process.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshtrain.config.families import with_family
from meshtrain.config.optimizer import LearningRateConfig, OptimizerConfig
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.run import ModelConfig
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.models.dtypes import DTYPES
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.runtime.mesh import init_mesh
from meshtrain.training.loss import build_loss
from meshtrain.training.optim import build_learning_rate, build_optimizer
from meshtrain.training.step import StepContext, train_step
from meshtrain.verify.parallel import local_rows
from tests.ranks import run_on_ranks

VOCABULARY, ROWS, MICRO_ROWS, LENGTH = 256, 8, 4, 32
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": LENGTH,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
MODELS = {"llama": LLAMA, "gpt2": GPT2}
BFLOAT16 = {"compute": "bfloat16"}


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        model: type of the model.
        precision: table of the plan.
        tables: other tables of the plan.
        optimizer: table of the run.
    """

    model: str
    precision: dict[str, Any]
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        return int(np.prod([*self.tables.get("mesh", {"tp": 1}).values()]))


def chain_batches(steps: int) -> Iterator[dict[str, Tensor]]:
    """Yield a global batch for each step, from a random chain of tokens."""
    stream = torch.Generator().manual_seed(7)
    chances = torch.softmax(2 * torch.randn(VOCABULARY, VOCABULARY, generator=stream), dim=1)
    for _ in range(steps):
        ids = [torch.randint(0, VOCABULARY, (ROWS,), generator=stream)]
        for _ in range(LENGTH):
            ids.append(torch.multinomial(chances[ids[-1]], 1, generator=stream).flatten())
        rows = torch.stack(ids, dim=1)
        yield {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def losses_of(training: Training, steps: int) -> list[float]:
    """Return the loss of each step of a training, on the ranks."""
    plan = ParallelPlan.model_validate(
        {"mesh": {"dp_shard": 1}, "precision": training.precision, **training.tables}, strict=False
    )
    model = build_meta_model(
        load_hf_config(ModelConfig(type=training.model, config=MODELS[training.model])),
        dtype=DTYPES[plan.precision.parameters],
    )
    batch = BatchShape(ROWS, MICRO_ROWS, LENGTH)
    plan = resolve_plan(with_family(plan, training.model), model, batch, training.world_size)
    pipeline = build_pipeline(
        model, init_mesh(plan.mesh, "cpu"), plan, micro_batch_size=MICRO_ROWS, seed=0, device=torch.device("cpu")
    )
    pipeline.initialize(0)
    optimizer = OptimizerConfig(learning_rate=3e-3, **training.optimizer)
    context = StepContext(
        pipeline=pipeline,
        loss=build_loss(pipeline),
        optimizer=build_optimizer(pipeline, optimizer),
        learning_rate=build_learning_rate(LearningRateConfig(name="constant"), optimizer.learning_rate, steps),
        max_gradient_norm=optimizer.max_gradient_norm,
    )
    return [
        train_step(context, step, local_rows(pipeline, global_batch), np.arange(ROWS)).loss
        for step, global_batch in enumerate(chain_batches(steps))
    ]


def last_loss(training: Training, steps: int) -> float:
    """Return the mean loss of the last tenth of the steps of a training."""
    losses = run_on_ranks(training.world_size, losses_of, training, steps, timeout=7200)[0]
    return float(np.mean(losses[-max(1, steps // 10) :]))


def _trainings() -> dict[str, Training]:
    recipes = ("rowwise", "tensorwise", "mxfp8")
    rowwise, tensorwise, blocks = ({"compute": "float8", "float8": {"recipe": name}} for name in recipes)
    hybrid = {"mesh": {"pp": 2, "dp_shard": 1, "tp": 2}, "tensor": {"sequence_parallel": True}}
    return {
        "llama-rowwise": Training("llama", rowwise),
        "llama-tensorwise": Training("llama", tensorwise),
        "llama-mxfp8": Training("llama", blocks),
        "llama-all-layers": Training("llama", {"compute": "float8", "float8": {"skip": []}}),
        "llama-rowwise-pp2-tp2": Training("llama", rowwise, hybrid),
        "llama-tensorwise-dp2-tp2": Training("llama", tensorwise, {"mesh": {"dp_shard": 2, "tp": 2}}),
        "llama-moments": Training("llama", BFLOAT16, optimizer={"state": "bfloat16"}),
        "llama-8-bit": Training("llama", BFLOAT16, optimizer={"name": "adamw-8bit"}),
        "gpt2-rowwise": Training("gpt2", rowwise),
        "gpt2-mxfp8": Training("gpt2", blocks),
        "gpt2-8-bit": Training("gpt2", BFLOAT16, optimizer={"name": "adamw-8bit"}),
        "gpt2-tensorwise-dp2-tp2": Training("gpt2", tensorwise, {"mesh": {"dp_shard": 2, "tp": 2}}),
    }


def main() -> None:
    """Print a row for each training."""
    trainings = _trainings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--trainings", nargs="+", choices=[*trainings], default=[*trainings])
    parser.add_argument("--small", action="store_true", help="a few steps of trainings in one process")
    options = parser.parse_args()
    if options.small:
        options.steps, options.trainings = 3, ["llama-tensorwise", "llama-moments"]
    expected: dict[str, float] = {}
    for name in options.trainings:
        training = trainings[name]
        if training.model not in expected:
            expected[training.model] = last_loss(Training(training.model, BFLOAT16), options.steps)
            print(f"{f'{training.model}-bfloat16':26} {expected[training.model]:.4f}", flush=True)
        loss = last_loss(training, options.steps)
        print(f"{name:26} {loss:.4f}  {loss / expected[training.model]:.4f} x", flush=True)


if __name__ == "__main__":
    main()
