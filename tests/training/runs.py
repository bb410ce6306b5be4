"""Small real runs: configurations, text, and the files that a run leaves."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.qwen3 import modeling_qwen3

from meshtrain import console
from meshtrain.checkpoint.dcp.reading import read_metadata, read_tensors, tensor_entries
from meshtrain.checkpoint.storage.directory import find_checkpoint
from meshtrain.config.data import DataConfig, TokenizerConfig
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.optimizer import LearningRateConfig, OptimizerConfig
from meshtrain.config.plan import ParallelPlan, PipelinePlan, PrecisionPlan, TensorPlan
from meshtrain.config.run import CheckpointConfig, EvaluationConfig, ModelConfig, RunConfig
from meshtrain.config.schedules import SCHEDULES
from meshtrain.runtime.environment import rank_from_environment
from meshtrain.training.hooks import Hook
from tests.casts import lift_float32_casts

# Loaded before casts are lifted.
MODELLING = (modeling_gpt2, modeling_qwen3)
WORDS = ("model", "reads", "text", "learns", "which", "token", "comes", "after", "others", "rows", "words")
VOCABULARY, SEQUENCE, GLOBAL_BATCH, MICRO_BATCH = 300, 16, 8, 2
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}
DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
QWEN3 = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
MODELS = {
    "gpt2": ModelConfig(type="gpt2", config={"vocab_size": VOCABULARY, **GPT2, **DRY}),
    "gpt2-dropout": ModelConfig(type="gpt2", config={"vocab_size": VOCABULARY, **GPT2}),
    "qwen3": ModelConfig(type="qwen3", config={"vocab_size": VOCABULARY, **QWEN3}),
}
# As users write them; RUN_TEXT and the text of a model make a run.
RUN_TEXT = """
run_directory = "out"
steps = 6
global_batch_size = 8
checkpoint.every = 2

[data]
train = ["text.jsonl"]
sequence_length = 16
tokenizer = { vocab_size = 300 }
cache_directory = "cache"
"""
LLAMA_TEXT = """
[model]
type = "llama"

[model.config]
vocab_size = 300
hidden_size = 48
intermediate_size = 50
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 32
"""
Mesh = tuple[int, int, int, int]
"""pp, dp_replicate, dp_shard, tp"""


def write_text(path: Path, *, documents: int = 60, seed: int = 0) -> Path:
    """Write a .jsonl file of short documents over a few words."""
    draw = np.random.default_rng(seed)
    texts = [" ".join(draw.choice(WORDS, draw.integers(5, 40))) for _ in range(documents)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def build_plan(mesh: Mesh, *, schedule: str = "1F1B", sequence_parallel: bool = False) -> ParallelPlan:
    """Return a plan in float64."""
    pp, dp_replicate, dp_shard, tp = mesh
    return ParallelPlan(
        mesh=MeshPlan(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp),
        pipeline=PipelinePlan(schedule=schedule, stages_per_rank=SCHEDULES[schedule].stages_per_rank or 2),
        tensor=TensorPlan(sequence_parallel=sequence_parallel),
        precision=PrecisionPlan(parameters="float64", compute="float64", reduce="float64"),
    )


def build_run(directory: Path, model: str, plan: ParallelPlan, **changes: Any) -> RunConfig:
    """Return a run of 6 steps with its text and cache beside the run directory."""
    text = directory.parent / "text.jsonl"
    if not text.exists():
        write_text(text)
    form = changes.pop("form", "packed")
    run = RunConfig(
        run_directory=str(directory),
        steps=6,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=MICRO_BATCH,
        model=MODELS[model],
        data=DataConfig(
            train=[str(text)],
            form=form,
            sequence_length=SEQUENCE,
            tokenizer=TokenizerConfig(vocab_size=VOCABULARY),
            cache_directory=str(directory.parent / "cache"),
        ),
        # As in the parity tests: a smaller epsilon would turn the rounding of a zero gradient into
        # a step.
        optimizer=OptimizerConfig(learning_rate=1e-2, epsilon=1e-4),
        learning_rate=LearningRateConfig(name="constant"),
        evaluation=EvaluationConfig(),
        checkpoint=CheckpointConfig(every=3),
        plan=plan,
    )
    return run.model_copy(update=changes)


def train_here(config: RunConfig, hooks: Sequence[Hook] = ()) -> list[dict[str, Any]]:
    """Train on this rank like the command line, and return the inputs of each step."""
    from meshtrain.training import loop
    from meshtrain.training.run import train_run

    console.configure(rank=rank_from_environment())
    lift_float32_casts()
    seen: list[dict[str, Any]] = []
    step_of_product = loop.train_step

    def spy(context: Any, step: int, batch: dict[str, Tensor], sample_ids: np.ndarray) -> Any:
        mesh = context.pipeline.mesh
        place = mesh.get_local_rank("dp_replicate") * mesh["dp_shard"].size() + mesh.get_local_rank("dp_shard")
        reads = context.pipeline.has_first_stage or context.pipeline.has_last_stage
        tokens, labels = batch["input_ids"].tolist(), batch["labels"].tolist()
        ids = sample_ids.tolist()
        seen.append({"step": step, "ids": ids, "place": place, "tokens": tokens, "labels": labels, "reads": reads})
        return step_of_product(context, step, batch, sample_ids)

    loop.train_step = spy
    train_run(config, hooks)
    return seen


def poison_gradient(call: int) -> None:
    """Make a gradient not finite in one step that this rank trains.

    Args:
        call: number of the step, counted from 1 and over all runs to come.
    """
    from meshtrain.training import step as step_module

    finish, times = step_module.finish_gradients, []

    def finish_poisoned(pipeline: Any) -> None:
        times.append(1)
        if len(times) == call:
            next(p for _, p in pipeline.named_parameters() if p.dim() == 2).grad.view(-1)[:1] = torch.nan
        finish(pipeline)

    step_module.finish_gradients = finish_poisoned


def samples_seen(ranks: list[list[dict[str, Any]]]) -> dict[int, tuple[list[int], list[list[int]]]]:
    """Return step -> sample ids and token rows of the full global batch, joined from all ranks."""
    result = {}
    for steps in zip(*ranks, strict=True):
        rows = {seen["place"]: seen["tokens"] for seen in steps if seen["reads"]}
        assert all(seen["ids"] == steps[0]["ids"] for seen in steps)
        for seen in steps:
            # Ranks between the embedding and the head have no tokens, but zeros and pads.
            assert seen["tokens"] == rows[seen["place"]] if seen["reads"] else np.unique(seen["tokens"]).max() <= 1
        result[steps[0]["step"]] = (steps[0]["ids"], [row for place in sorted(rows) for row in rows[place]])
    return result


def read_metrics(directory: Path) -> list[dict[str, float]]:
    """Return the objects of metrics.jsonl."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def steps_of(directory: Path) -> list[dict[str, float]]:
    """Return the objects of the steps."""
    return [metrics for metrics in read_metrics(directory) if "loss" in metrics]


def read_checkpoint(directory: Path) -> dict[str, Tensor]:
    """Return weights and AdamW's moments in the newest checkpoint of a run."""
    checkpoint = find_checkpoint(directory)
    metadata = read_metadata(checkpoint)
    entries = tensor_entries(metadata)
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    read_tensors(checkpoint, metadata, tensors)
    return tensors
