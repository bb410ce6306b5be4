"""Compiled layers: torch compiles one graph for all that are alike, not one for each."""

from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from meshtrain.config.run import RunConfig
from meshtrain.planning.calibration.overhead import build_real
from meshtrain.planning.needs import simulated_run
from meshtrain.training.resolve import resolve_run
from meshtrain.training.step import train_step
from tests.ranks import run_on_ranks

SHAPE = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
# torch gives up a function after it was compiled so many times.
DEPTHS = (4, 10)
FLOAT8 = {"precision": {"compute": "float8", "float8": {"skip": []}}}


def graphs_of_layers(plan: dict[str, Any], world_size: int, depth: int) -> int:
    """Return how many graphs torch has compiled in two steps of a model with so many layers."""
    torch._dynamo.reset()
    counters.clear()
    config = {
        "run_directory": "unused",
        "steps": 2,
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "model": {"type": "llama", "config": {**SHAPE, "num_hidden_layers": depth, "num_key_value_heads": 2}},
        "data": {"sequence_length": 16, "tokenizer": {"vocab_size": 300}},
        "plan": {**plan, "compile": {"enabled": True, "backend": "aot_eager"}},
    }
    run = simulated_run(resolve_run(RunConfig.model_validate(config), world_size), on_gpus=False)
    context, batch = build_real(run, torch.device("cpu"))
    for step in range(2):
        train_step(context, step, batch, np.arange(4))
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("plan", "world_size"),
    [
        (FLOAT8, 1),
        ({"mesh": {"pp": 2}}, 2),
        ({"mesh": {"tp": 2}}, 2),
        ({"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}}, 2),
    ],
    ids=["float8", "pp", "tp", "sequence parallel"],
)
def test_layers_share_their_graphs(plan: dict[str, Any], world_size: int) -> None:
    few, many = (run_on_ranks(world_size, graphs_of_layers, plan, world_size, depth)[0] for depth in DEPTHS)
    assert few == many
    assert few <= 3
