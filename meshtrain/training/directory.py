"""Files of the run directory, and the check that they belong to this run.

RUN/run.toml            the resolved configuration
RUN/plan.toml           the resolved plan
RUN/metrics.jsonl       one object per start, step, evaluation, checkpoint and epoch
RUN/prediction.json     what was predicted for a step, see meshtrain.profiling.files
RUN/profile/            what was measured in a few steps, see meshtrain.profiling.hook
RUN/tensorboard/        the same for TensorBoard
RUN/trackers.json       which run of each other tracker belongs to this run
RUN/wandb/              what Weights & Biases has written, see meshtrain.training.trackers
RUN/mlflow/             the store of MLflow, if MLFLOW_TRACKING_URI names no other
RUN/failure.json        why the run ended, if it failed; removed once the run trains again
RUN/flight_recorder/    the latest collectives of every process, if one vanished or hung
RUN/checkpoints/step-N  a checkpoint, see meshtrain.checkpoint.storage.directory; if
                        checkpoint.directory is set, checkpoints are stored there instead
RUN/.lock-TOKEN         the process that writes here now, see meshtrain.runtime.lock; the file is
                        beside RUN if RUN was new when the run began. The folder of the checkpoints
                        has such a file too.
"""

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshtrain.checkpoint.storage.directory import CHECKPOINTS_NAME, list_checkpoints
from meshtrain.checkpoint.storage.location import open_location
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.reading import shown_path
from meshtrain.config.run import RunConfig
from meshtrain.config.settings import Settings
from meshtrain.config.toml import dump_toml
from meshtrain.data.cache import write_atomically
from meshtrain.errors import ConfigError, Problem, reason_of
from meshtrain.runtime.location import Location
from meshtrain.training.files import METRICS_NAME, PLAN_NAME, RUN_NAME

# Keys that may change between a stop and a resume. They set how the run is laid out, shown and
# saved, and how long it is. All other keys decide what is learned. Two keys need a reason:
# - bad_steps: before the first bad step, every policy learns the same. The checkpoint records which
#   steps were skipped or left out. A user whose run was stopped by the policy "stop" must be able
#   to resume with another policy.
# - data.on_bad_record: `Identity.check` compares the data that was read.
FREE = (
    "run_directory",
    "steps",
    "epochs",
    "micro_batch_size",
    "evaluation",
    "tasks",
    "generate",
    "ema.evaluate",
    "checkpoint",
    "logging",
    "stop_after",
    "watchdog",
    "machine",
    "bad_steps",
    "profile",
    "self_checks",
    "plan",
    "data.cache_directory",
    "data.on_bad_record",
    "model.attention",
)


def check_directory(config: RunConfig) -> None:
    """Check that the run directory holds no other run.

    Raises:
        ConfigError: with every key that differs from the run in the directory, or if the directory
            cannot be written.
    """
    directory = Path(config.run_directory)
    _check_writable(directory)
    path = directory / RUN_NAME
    if not path.exists() or not _holds_work(config):
        return
    # A file from before a key existed lacks it: the run has trained with the default.
    there = {**_defaults(), **decisive(_read_resolved(path))}
    here = decisive(tomllib.loads(dump_toml(config)))
    if different := differences(there, here):
        raise ConfigError(
            [
                *(f"{shown_path(path)}: {difference}" for difference in different),
                Problem(
                    f"{shown_path(directory)} holds another run",
                    "choose another run_directory, resume that run unchanged, or, to continue it with other settings, "
                    f"change {shown_path(path)} too",
                ),
            ]
        )


def metrics_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the complete lines of metrics.jsonl, each with its object.

    The last line of a killed run may be incomplete. After a power cut, lines may hold any bytes.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.exists() else []
    for line in lines:
        try:
            metrics = json.loads(line) if line.endswith("\n") else None
        except ValueError:
            continue
        if isinstance(metrics, dict) and isinstance(metrics.get("step"), int):
            yield line, metrics


def checkpoints_root(config: RunConfig) -> Location:
    """Return the location of a run's checkpoints.

    Raises:
        CheckpointError: if no installed library can reach it.
    """
    if config.checkpoint.directory is None:
        return Path(config.run_directory) / CHECKPOINTS_NAME
    return open_location(config.checkpoint.directory)


def changed_length(config: RunConfig) -> str | None:
    """Return how the length of the run has changed since its last start; None if it has not."""
    path = Path(config.run_directory) / RUN_NAME
    there = _read_resolved(path) if path.exists() else {}
    here = config.model_dump()
    for name in ("steps", "epochs"):
        before, now = there.get(name), here[name]
        if isinstance(before, int) and now is not None and before != now:
            return f"{name} was {before:,} and is {now:,}"
    return None


def _read_resolved(path: Path) -> dict[str, Any]:
    """Read the run file of a run directory, which a user may have edited.

    Raises:
        ConfigError: if it cannot be read.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"{shown_path(path)} cannot be read: {reason_of(error)}", "correct it, or choose another run_directory"
        ) from error


def _check_writable(directory: Path) -> None:
    # `Path.exists()` is not used: it raises an error if the parent directory may not be searched.
    existing = next(place for place in (directory, *directory.parents) if os.path.exists(place))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        what = "not a directory" if not existing.is_dir() else "not writable"
        raise ConfigError(
            f"run_directory = {shown_path(directory)}: {shown_path(existing)} is {what}", "choose another directory"
        )


def differences(
    there: Mapping[str, object],
    here: Mapping[str, object],
    places: tuple[str, str] = ("in that file", "in this run"),
) -> list[str]:
    """Return a line for each value that is not the same on both sides.

    Args:
        places: what the lines call the two sides.
    """
    unset = object()

    def shown_value(side: Mapping[str, object], name: str) -> str:
        return repr(side[name]) if name in side else "not set"

    names = sorted(name for name in {*there, *here} if there.get(name, unset) != here.get(name, unset))
    return [
        f"{name} is {shown_value(there, name)} {places[0]} and {shown_value(here, name)} {places[1]}" for name in names
    ]


def write_resolved(config: RunConfig, plan: ParallelPlan) -> None:
    """Write the resolved configuration and plan into the run directory."""
    directory = Path(config.run_directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / RUN_NAME, dump_toml(config.model_copy(update={"plan": plan})))
    write_atomically(directory / PLAN_NAME, dump_toml(plan))


def _holds_work(config: RunConfig) -> bool:
    """Return whether the run has checkpoints or metrics that could be lost."""
    metrics = Path(config.run_directory) / METRICS_NAME
    return bool(list_checkpoints(checkpoints_root(config))) or (metrics.exists() and metrics.stat().st_size > 0)


def decisive(run: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that a resumed run must share, by their full keys."""
    free_tables = tuple(f"{key}." for key in FREE)
    return {key: value for key, value in _flat(run).items() if key not in FREE and not key.startswith(free_tables)}


def _defaults() -> dict[str, Any]:
    """Return the default of each decisive setting that has one, by its full key."""
    fields = RunConfig.model_fields.items()
    tables = {name: field.default for name, field in fields if not field.is_required() and field.default is not None}
    values = {name: it.model_dump(exclude_none=True) if isinstance(it, Settings) else it for name, it in tables.items()}
    return decisive(values)


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        flat.update(_flat(value, f"{name}.") if isinstance(value, dict) else {name: value})
    return flat
