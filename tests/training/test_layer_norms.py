"""The gradient norms of layers are those of one process on every mesh."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshtrain.config.run import LoggingConfig
from meshtrain.training.gradients import layer_of, layers_of
from meshtrain.training.step import train_step
from meshtrain.verify.parallel import build_step_context, local_rows
from tests.casts import lift_float32_casts
from tests.parity import GLOBAL_BATCH, Case, batches, build, fill, stock, stock_weights
from tests.ranks import run_on_ranks
from tests.training.runs import build_plan, build_run, steps_of, train_here

CASES = {
    2: [Case("gpt2-tied", mesh) for mesh in ((1, 1, 2, 1), (1, 1, 1, 2), (2, 1, 1, 1), (1, 2, 1, 1))],
    4: [Case("qwen3", (2, 1, 1, 2), sequence_parallel=True), Case("llama-untied", (2, 1, 2, 1))],
}


def norms_of(cases: list[Case]) -> list[tuple[dict[str, float], float]]:
    lift_float32_casts()
    found = []
    for case in cases:
        pipeline = build(case)
        fill(pipeline, stock_weights(case.model))
        context = replace(build_step_context(pipeline), layer_norms=layers_of(pipeline))
        result = train_step(context, 0, local_rows(pipeline, batches()[0]), np.arange(GLOBAL_BATCH))
        found.append((result.layer_norms, result.gradient_norm))
    return found


@pytest.mark.parametrize("world_size", CASES)
def test_every_mesh_measures_what_one_process_does(world_size: int) -> None:
    answers = run_on_ranks(world_size, norms_of, CASES[world_size])
    for number, case in enumerate(CASES[world_size]):
        squares: dict[str, float] = defaultdict(float)
        for name, gradient in stock(case.model).gradients[0].items():
            squares[layer_of(name)] += float(gradient.square().sum())
        wanted = {name: square**0.5 for name, square in squares.items()}
        for norms, total in (answer[number] for answer in answers):
            assert norms == pytest.approx(wanted, rel=1e-12), case
            assert sum(norm**2 for norm in norms.values()) ** 0.5 == pytest.approx(total, rel=1e-12)


def test_run_writes_them_if_asked(tmp_path: Path) -> None:
    for name, logging in (("with", LoggingConfig(layer_norms=True)), ("without", LoggingConfig())):
        run = build_run(tmp_path / name, "gpt2", build_plan((1, 1, 1, 1)), steps=1, logging=logging)
        run_on_ranks(1, train_here, run, joins=False)
    (found,), (without,) = (steps_of(tmp_path / name) for name in ("with", "without"))
    norms = [key.removeprefix("grad_norm/") for key in found if key.startswith("grad_norm/")]
    outside = ["transformer.ln_f", "transformer.wpe", "transformer.wte"]
    assert norms == [*(f"transformer.h.{layer}" for layer in range(4)), *outside]
    assert not any(key.startswith("grad_norm/") for key in without)
    assert found["grad_norm"] == without["grad_norm"]


@pytest.mark.parametrize(
    ("fqn", "layer"),
    [
        ("model.layers.11.mlp.up_proj.weight", "model.layers.11"),
        ("model.layers.2.mlp.experts.7.up_proj.weight", "model.layers.2"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_layer_is_named_by_its_number(fqn: str, layer: str) -> None:
    assert layer_of(fqn) == layer
