"""Run directories made by hand: what long, failed and profiled runs leave behind."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshtrain.pictures.timeline import Timeline
from meshtrain.profiling.files import (
    AxisTraffic,
    Prediction,
    ProfiledMessages,
    ProfiledRank,
    ProfileSummary,
    prediction_path,
    summary_path,
)
from meshtrain.runtime.failure import Failure
from tests.pictures.examples import GIB, pipeline

RUN = """
run_directory = "out"
steps = 200
global_batch_size = 64
model.path = "org/model-7b"
"""
PLAN = "[mesh]\npp = 2\ndp_replicate = 1\ndp_shard = 4\ntp = 1\n"
FAULT = "the loss is nan, the gradient norm nan"


def step(number: int, **changes: Any) -> dict[str, Any]:
    """Return the object of a step."""
    return {
        "step": number,
        "epoch": 1,
        "loss": 2 + 8 * math.exp(-number / 40),
        "grad_norm": 1 + 10 / number,
        "learning_rate": 3e-4 * min(1.0, number / 20),
        "tokens": number * 65_536,
        "trained_tokens": 65_536,
        "tokens_per_second": 80_000 + 2_000 * math.sin(number),
        "teraflops_per_second": 400.0,
        "memory_bytes": 70 * GIB,
        "seconds": 0.8,
        "data_seconds": 0.05,
        "forward_backward_seconds": 0.6,
        "optimizer_seconds": 0.1,
        **changes,
    }


def long_run() -> list[dict[str, Any]]:
    """Return the objects of a run with restarts, evaluations, checkpoints and bad steps."""
    found: list[dict[str, Any]] = [{"step": 0, "parameters_checksum": "abc"}]
    for number in range(1, 151):
        if number == 81:
            found.append({"step": 80, "parameters_checksum": "def"})
        if number == 100:
            bad = {"bad_step": 100, "fault": FAULT, "samples": list(range(20)), "answer": "skip", "times": 1}
            found += [step(100, loss=None, grad_norm=None, bad_steps=1), {"step": 100, **bad}]
        else:
            found.append(step(number, **({"seconds": 9.0} if number in (1, 81) else {})))
        if number % 25 == 0:
            found.append({"step": number, "eval_loss": 3.0, "eval_loss/web": 3.5, "evaluation_seconds": 2.0})
        if number % 40 == 0:
            found.append({"step": number, "checkpoint_seconds": 1.5})
            found.append({"step": number, "checkpoint_background_seconds": 6.0, "checkpoint": f"s3://b/step-{number}"})
    found.append({"step": 150, "epoch": 1, "epoch_steps": 150, "epoch_loss": 3.0})
    return found


def prediction() -> Prediction:
    """Return a prediction of that run."""
    return Prediction(
        machine="h100-80gb",
        measured=False,
        is_cpu=False,
        world_size=8,
        limit_bytes=79 * GIB,
        peak_bytes=(68 * GIB, 50 * GIB),
        fits=True,
        verdict="It fits h100-80gb.",
        step_seconds=0.75,
        tokens_per_second=11_000.0,
        mfu=0.45,
        peak_tflops=989.0,
        bubble=0.25,
        axes={"pp": AxisTraffic(GIB, 0.02, 0.01), "dp_shard": AxisTraffic(30 * GIB, 0.2, 0.05)},
        timeline=pipeline(2, 8, unit=0.02),
    )


def summary() -> ProfileSummary:
    """Return a profile of that run."""
    messages = (
        ProfiledMessages("dp_shard", "all_gather_into_tensor", 64, 20 * GIB, 0.15),
        ProfiledMessages("dp_shard", "reduce_scatter_tensor", 32, 10 * GIB, 0.1),
        ProfiledMessages("pp", "send", 8, GIB, 0.03),
    )
    ranks = tuple(ProfiledRank(rank, (69 if rank < 4 else 51) * GIB + rank, messages) for rank in range(8))
    return ProfileSummary((20, 24), (0.8, 0.79, 0.81, 0.8, 0.8), ranks, pipeline(2, 8, unit=0.021))


def failure() -> Failure:
    """Return the reason why that run ended."""
    return Failure("exception", 3, "node7", "RuntimeError: CUDA error <b>", activity="step 151, stage 0, forward")


def write_directory(
    directory: Path,
    metrics: Iterable[dict[str, Any]],
    *,
    predicted: Prediction | None = None,
    profiled: ProfileSummary | None = None,
    failed: Failure | None = None,
) -> Path:
    """Write a run directory, and return it."""
    directory.mkdir(parents=True)
    (directory / "run.toml").write_text(RUN)
    (directory / "plan.toml").write_text(PLAN)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in metrics))
    if predicted is not None:
        prediction_path(directory).write_text(json.dumps(predicted.to_json()))
    if profiled is not None:
        summary_path(directory).parent.mkdir()
        summary_path(directory).write_text(json.dumps(profiled.to_json()))
    if failed is not None:
        failed.write(directory)
    return directory


def empty_timeline() -> Timeline:
    """Return a timeline of no process."""
    return Timeline(())
