"""The noise scale of gradients is that of one process on every mesh, also in a resumed run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from meshtrain.config.run import CheckpointConfig, LoggingConfig
from meshtrain.errors import ConfigError
from meshtrain.training.noise_scale import DECAY, NoiseScale
from meshtrain.training.resolve import resolve_run
from meshtrain.training.step import train_step
from meshtrain.verify.parallel import build_step_context, local_rows
from meshtrain.verify.reference import copy_weights_into, train_model
from tests.casts import lift_float32_casts
from tests.parity import GLOBAL_BATCH, Case, _stock_model, batches, build, fill, stock_weights
from tests.ranks import run_on_ranks
from tests.training.runs import build_plan, build_run, steps_of, train_here

MODEL = "llama-untied"
CASES = {
    1: [Case(MODEL, (1, 1, 1, 1))],
    2: [Case(MODEL, mesh) for mesh in ((1, 1, 2, 1), (1, 2, 1, 1), (1, 1, 1, 2), (2, 1, 1, 1))],
    4: [Case(MODEL, (2, 1, 1, 2)), Case(MODEL, (2, 2, 1, 1))],
}


def norms_of_parts() -> dict[int, tuple[float, int]]:
    """Return number of sequences -> gradient norm and trained tokens of the stock model."""
    lift_float32_casts()
    found = {}
    for size in (1, 2, 4, GLOBAL_BATCH):
        model = _stock_model(MODEL)
        copy_weights_into(model, stock_weights(MODEL))
        part = {name: value[:size] for name, value in batches()[0].items()}
        trace = train_model(model, [part])
        squares = sum(float(it.square().sum()) for it in trace.gradients[0].values())
        found[size] = squares**0.5, int((part["labels"] != -100).sum())
    return found


def measured(cases: list[Case]) -> list[list[dict[str, float]]]:
    """Return what a step measures, without and with the noise scale."""
    lift_float32_casts()
    found = []
    for case in cases:
        both = []
        for every in (None, 1):
            pipeline = build(case)
            fill(pipeline, stock_weights(case.model))
            context = replace(build_step_context(pipeline), noise_scale=NoiseScale(every))
            result = train_step(context, 0, local_rows(pipeline, batches()[0]), np.arange(GLOBAL_BATCH))
            both.append({"loss": result.loss, "norm": result.gradient_norm, **result.noise})
        found.append(both)
    return found


def test_every_mesh_measures_what_one_process_does() -> None:
    (norms,) = run_on_ranks(1, norms_of_parts)
    large, num_tokens = norms[GLOBAL_BATCH]
    for world_size, cases in CASES.items():
        answers = run_on_ranks(world_size, measured, cases)
        for number, case in enumerate(cases):
            # `build` makes smaller microbatches over dp. 1F1B needs a microbatch for each stage.
            pp, dp_replicate, dp_shard, _ = case.mesh
            small, small_tokens = norms[2 * pp // (dp_replicate * dp_shard)]
            sizes = small_tokens / num_tokens * GLOBAL_BATCH, GLOBAL_BATCH
            variance = (small**2 - large**2) / (1 / sizes[0] - 1 / sizes[1])
            squared = (sizes[1] * large**2 - sizes[0] * small**2) / (sizes[1] - sizes[0])
            wanted = {"gradient_variance": variance, "gradient_squared_norm": squared}
            if squared > 0:
                wanted["noise_scale"] = variance / squared
            for without, found in (answer[number] for answer in answers):
                assert found == pytest.approx({**without, **wanted}, rel=1e-11), case
                assert without["norm"] == pytest.approx(large, rel=1e-12)


def test_noise_scale_of_random_gradients_is_found() -> None:
    """Gradients of single sequences have norm 1 in the mean, and a variance of 40."""
    draw, numbers, scale = torch.Generator().manual_seed(0), 400, NoiseScale(1)
    mean = torch.full((numbers,), numbers**-0.5)
    for _ in range(300):
        rows = mean + (40 / numbers) ** 0.5 * torch.randn(16, numbers, generator=draw)
        small, large = (float(part.mean(0).norm()) for part in (rows[:2], rows))
        # Each sequence has five tokens.
        found = scale.add((small, 10.0), large, 80, 16)
    assert found["noise_scale"] == pytest.approx(40, rel=0.15)


def test_measurements_without_a_meaning_are_left_out() -> None:
    scale = NoiseScale(1)
    for small in ((float("inf"), 10.0), (1.0, 0.0), (1.0, 80.0), ()):
        assert scale.add(small, 1.0, 80, 16) == {}
    assert scale == NoiseScale(1)
    # The norm of the small batch is so high that nothing is left of the true gradient's.
    assert scale.add((9.0, 10.0), 1.0, 80, 16).keys() == {"gradient_variance", "gradient_squared_norm"}
    # That of the small batch is too low: a variance below 0 is none.
    below = NoiseScale(1).add((0.9, 10.0), 1.0, 80, 16)
    assert below == {
        "gradient_variance": pytest.approx((0.81 - 1) * 16 / 7),
        "gradient_squared_norm": pytest.approx((8 - 0.81) / 7),
    }


def test_run_measures_every_few_steps_and_resumes_on_other_meshes(tmp_path: Path) -> None:
    logging = LoggingConfig(noise_scale_every=2)
    settings = {"logging": logging, "checkpoint": CheckpointConfig(every=1)}
    whole = build_run(tmp_path / "whole", "qwen3", build_plan((1, 1, 1, 1)), steps=5, **settings)
    run_on_ranks(1, train_here, whole, joins=False)
    for steps, mesh in ((2, (1, 1, 2, 1)), (4, (1, 1, 1, 2)), (5, (1, 2, 1, 1))):
        run = build_run(tmp_path / "other", "qwen3", build_plan(mesh), steps=steps, **settings)
        run_on_ranks(2, train_here, run, joins=False)
    wanted, found = (steps_of(tmp_path / name) for name in ("whole", "other"))
    variances = []
    for step, (here, there) in enumerate(zip(found, wanted, strict=True)):
        keys = [key for key in there if "noise" in key or "gradient_" in key]
        assert bool(keys) == (step % 2 == 0)
        for key in ("loss", "grad_norm", *keys):
            assert here[key] == pytest.approx(there[key], rel=1e-10)
        variances += [there["gradient_variance"]] if keys else []
    average = 0.0
    for value in variances:
        average = DECAY * average + (1 - DECAY) * value
    squares = [it["gradient_squared_norm"] for it in wanted if "gradient_squared_norm" in it]
    mean = 0.0
    for value in squares:
        mean = DECAY * mean + (1 - DECAY) * value
    assert wanted[-1]["noise_scale"] == pytest.approx(average / mean, rel=1e-9)


def test_batch_without_a_smaller_part_is_refused(tmp_path: Path) -> None:
    logging = LoggingConfig(noise_scale_every=2)
    plan = build_plan((2, 1, 1, 1))
    run = build_run(tmp_path / "run", "qwen3", plan, logging=logging, global_batch_size=4)
    with pytest.raises(ConfigError) as caught:
        resolve_run(run)
    assert caught.value.lines == (
        "logging.noise_scale_every compares a batch with a part of it, and a batch of 4 sequences has none: this plan "
        "computes at least 4 in a step; raise global_batch_size, lower micro_batch_size, or leave it out",
    )
