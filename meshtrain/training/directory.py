"""The run directory: what it holds, and whether it is this run's.

RUN/run.toml            the resolved configuration
RUN/plan.toml           the resolved plan
RUN/metrics.jsonl       one object per step, evaluation, checkpoint and epoch
RUN/tensorboard/        the same for TensorBoard
RUN/checkpoints/step-N  see meshtrain.checkpoint.directory
"""

import tomllib
from pathlib import Path
from typing import Any

from meshtrain.config.plan import ParallelPlan
from meshtrain.config.run import RunConfig
from meshtrain.config.toml import dump_toml
from meshtrain.errors import ConfigError

RUN_NAME, PLAN_NAME = "run.toml", "plan.toml"
# What may change between a stop and a resume: how the run is laid out, shown and saved, and how long it goes on. All
# else decides what is learned.
FREE = (
    "run_directory",
    "steps",
    "epochs",
    "micro_batch_size",
    "evaluation",
    "checkpoint",
    "logging",
    "plan",
    "data.cache_directory",
    "data.validation",
    "model.attention",
)


def check_directory(config: RunConfig) -> None:
    """Check that the run directory is new or holds this very run.

    Raises:
        ConfigError: with every key that differs.
    """
    path = Path(config.run_directory) / RUN_NAME
    if not path.exists():
        return
    there, here = _flat(tomllib.loads(path.read_text())), _flat(tomllib.loads(dump_toml(config)))
    different = [
        f"{path}: {key} is {there.get(key, 'not set')!r} there and {here.get(key, 'not set')!r} here"
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key) and not key.startswith(FREE)
    ]
    if different:
        raise ConfigError(
            [
                *different,
                f"{config.run_directory} holds another run; choose another run_directory, or resume that run unchanged",
            ]
        )


def write_resolved(config: RunConfig, plan: ParallelPlan) -> None:
    """Write the resolved configuration and plan into the run directory."""
    directory = Path(config.run_directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / RUN_NAME).write_text(dump_toml(config.model_copy(update={"plan": plan})))
    (directory / PLAN_NAME).write_text(dump_toml(plan))


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        flat.update(_flat(value, f"{name}.") if isinstance(value, dict) else {name: value})
    return flat
