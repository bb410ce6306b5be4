"""Runs of models with length-dependent rotary frequencies."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

from meshtrain.checkpoint.manifest import read_manifest
from meshtrain.checkpoint.storage.directory import find_checkpoint
from meshtrain.config.run import CheckpointConfig, EvaluationConfig, ModelConfig, RunConfig
from tests.parity import DYNAMIC, LLAMA, LONGROPE
from tests.ranks import run_on_ranks
from tests.training.runs import Mesh, build_plan, build_run, steps_of, train_here

# Loaded before casts are lifted.
MODELLING = (modeling_llama, modeling_phi3)
SIZES = {**LLAMA, "vocab_size": 300, "num_key_value_heads": 2}
PHI3 = ModelConfig(type="phi3", config={**SIZES, "rope_parameters": LONGROPE, "original_max_position_embeddings": 10})
GROWING = ModelConfig(type="llama", config={**SIZES, "rope_parameters": DYNAMIC, "max_position_embeddings": 10})


def write_lines(path: Path, *, seed: int) -> None:
    """Write documents whose lengths make batches of all widths."""
    draw = np.random.default_rng(seed)
    texts = ["".join(draw.choice(list("abcdefghijklmnop"), draw.integers(3, 18))) for _ in range(96)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def run_of(directory: Path, model: ModelConfig, mesh: Mesh, **data: Any) -> RunConfig:
    run = build_run(directory, "gpt2", build_plan(mesh), checkpoint=CheckpointConfig(every=2))
    return run.model_copy(update={"model": model, "data": run.data.model_copy(update=data)})


def train_on_ranks(config: RunConfig) -> list[tuple[int, float, float]]:
    """Train on as many ranks as the plan needs; return width and metrics of each step."""
    mesh = config.plan.mesh
    ranks = run_on_ranks(mesh.pp * mesh.dp_replicate * mesh.dp_shard * mesh.tp, train_here, config, joins=False)
    written = {step["step"]: step for step in steps_of(Path(config.run_directory))}
    widths = [(step["step"] + 1, len(step["tokens"][0])) for step in ranks[0]]
    return [(width, written[step]["loss"], written[step]["grad_norm"]) for step, width in widths]


def assert_equal(found: list[tuple[int, float, float]], wanted: list[tuple[int, float, float]]) -> None:
    for step, expected in zip(found, wanted, strict=True):
        assert step == pytest.approx(expected, rel=1e-12, abs=0)


def test_phi3_with_long_sequences_trains_like_in_one_process(tmp_path: Path) -> None:
    evaluation = {"evaluation": EvaluationConfig(every=2), "steps": 4}
    alone, pipelined = (
        train_on_ranks(run_of(tmp_path / name, PHI3, mesh, validation=0.2).model_copy(update=evaluation))
        for name, mesh in (("alone", (1, 1, 1, 1)), ("pipelined", (2, 1, 1, 2)))
    )
    assert_equal(pipelined, alone)


def test_resumed_run_has_the_same_frequencies(tmp_path: Path) -> None:
    write_lines(tmp_path / "text.jsonl", seed=0)
    write_lines(tmp_path / "others.jsonl", seed=1)
    padded = {"form": "padded", "pad_to_multiple_of": 2, "group_by_length": 6}
    # An evaluation on other widths does not change the frequencies.
    evaluated = {**padded, "validation": [str(tmp_path / "others.jsonl")]}
    whole = run_of(tmp_path / "whole", GROWING, (1, 1, 1, 1), **evaluated)
    wanted = train_on_ranks(whole.model_copy(update={"evaluation": EvaluationConfig(every=1)}))
    # The third batch is not longer than the second, and not short enough to reset the frequencies.
    assert [width for width, *_ in wanted][1:3] == [12, 10]
    traveling = run_of(tmp_path / "traveling", GROWING, (2, 1, 1, 1), **padded)
    train_on_ranks(traveling.model_copy(update={"steps": 2}))
    assert read_manifest(find_checkpoint(tmp_path / "traveling")).rotary_length == 12
    found = train_on_ranks(traveling.model_copy(update={"plan": build_plan((1, 1, 2, 1))}))
    assert_equal(found, wanted[2:])
