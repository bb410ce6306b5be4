"""Small profiled runs, and the files that they leave."""

import gzip
import json
import math
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from meshtrain.config.run import RunConfig
from meshtrain.errors import TrainingStopped
from meshtrain.planning.memory import memory_use
from meshtrain.planning.needs import simulated_run
from meshtrain.planning.simulation.rank import simulate_rank
from meshtrain.planning.totals import totals_of
from meshtrain.profiling.files import PROFILE_NAME, ProfileSummary, read_summary
from meshtrain.profiling.hook import profile_hooks
from meshtrain.training.resolve import resolve_run
from tests.ranks import run_on_ranks
from tests.training.runs import train_here

Messages = dict[tuple[str, str], tuple[int, int]]
"""(axis, operator) -> number and bytes, in a step."""


def train_profiled(*configs: RunConfig) -> list[str]:
    """Train on this rank, one run after another; return what each printed, or why it stopped."""
    shown = []
    for config in configs:
        with redirect_stdout(StringIO()) as printed:
            try:
                train_here(config, profile_hooks(config))
                shown.append(printed.getvalue())
            except TrainingStopped as stopped:
                shown.append(str(stopped))
    return shown


def world_size(config: RunConfig) -> int:
    """Return the number of ranks that the plan of a run needs."""
    return math.prod(config.plan.mesh.degrees.values())


def profiled(*configs: RunConfig) -> list[str]:
    """Train on ranks, and return what the first one printed in each run."""
    first, *_ = run_on_ranks(world_size(configs[0]), train_profiled, *configs, joins=False)
    return first


def summary_of(config: RunConfig) -> ProfileSummary:
    """Return the summary that a run has left."""
    summary = read_summary(Path(config.run_directory))
    assert summary is not None
    return summary


def trace_of(config: RunConfig, rank: int) -> list[dict[str, Any]]:
    """Return the events of the trace that a rank has left."""
    path = Path(config.run_directory) / PROFILE_NAME / f"trace-rank-{rank}.json.gz"
    with gzip.open(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def predicted(config: RunConfig) -> list[tuple[Messages, int]]:
    """Return for each rank what a simulation predicts: its messages, and its peak in bytes."""
    (found,) = run_on_ranks(1, _simulated, config, joins=False)
    return found


def _simulated(config: RunConfig) -> list[tuple[Messages, int]]:
    size = world_size(config)
    run = simulated_run(resolve_run(config, size), on_gpus=False)
    profiles = [simulate_rank(run, rank) for rank in range(size)]
    return [(totals_of(profile.work()).messages, memory_use(profile).peak_bytes) for profile in profiles]


def measured_messages(summary: ProfileSummary) -> list[Messages]:
    """Return the messages of each rank without their seconds."""
    return [{(one.axis, one.operator): (one.number, one.bytes) for one in rank.messages} for rank in summary.ranks]
