"""The hook that measures a few steps of a run.

RUN/profile/trace-rank-N.json.gz  the trace of the last of these steps, for Perfetto
RUN/profile/memory-rank-N.pickle  on a GPU, the memory record of that step, for torch's memory_viz
RUN/profile/summary.json          numbers of all processes, see meshtrain.profiling.files
"""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

import torch
import torch.distributed as dist

from meshtrain import console
from meshtrain.config.mesh import AXES, PP
from meshtrain.config.reading import shown_path
from meshtrain.config.run import RunConfig
from meshtrain.data.cache import write_atomically
from meshtrain.errors import Problem, TrainingStopped, reason_of
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.pictures.timeline import Lane, Span, Timeline
from meshtrain.profiling.files import PROFILE_NAME, ProfiledRank, ProfileSummary, summary_path
from meshtrain.profiling.lines import show_profile
from meshtrain.profiling.stopwatch import Stopwatch
from meshtrain.profiling.tracer import TracedStep, Tracer
from meshtrain.runtime.agreement import gather_objects
from meshtrain.runtime.mesh import axis_rank
from meshtrain.training.hooks import Hook, Metrics, RunState

MOST_LANES = 64
"""Number of processes up to which each has a lane in the timeline."""


@dataclass(frozen=True)
class _Found:
    """What one process has measured: a step without and a step with a trace.

    Attributes:
        problem: why files could not be written.
        traced: the step with a trace, unless there is a problem.
        lane: of the process in the timeline, if it has one.
    """

    problem: Problem | None
    traced: TracedStep | None
    lane: Lane | None


def profile_hooks(config: RunConfig) -> list[Hook]:
    """Return the hook that measures the steps of `profile.steps`; none if there are none."""
    if config.profile.steps is None:
        return []
    first, last = config.profile.steps
    return [ProfileHook(first, last)]


class ProfileHook(Hook):
    """Measures a few steps, and writes what it has found into the run directory.

    All steps but the last are timed, and nothing else is done in them. The last one is traced,
    which takes time.

    Args:
        first: the first of these steps, counted from 1.
        last: the last one.
    """

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._has_trained = self._is_awaited = self._is_done = False
        self._stopwatch: Stopwatch | None = None
        self._tracer: Tracer | None = None
        self._seconds: list[float] = []

    def on_start(self, state: RunState, metrics: Metrics) -> None:
        """Wait for the first step, or start over after a rewind."""
        self._abandon(state)
        if self._is_done:
            return
        reason = self._reason_against(state)
        self._is_awaited = reason is None
        if self._is_awaited and state.step == self._first - 1:
            self._begin(state)
        if reason is not None and not summary_path(Path(state.config.run_directory)).exists():
            console.line(f"{self._shown()} are not profiled, because {reason}")

    def on_step(self, state: RunState, metrics: Metrics) -> None:
        """Begin before the first step, change from times to a trace, and write after the last."""
        self._has_trained = True
        if self._is_awaited and state.step == self._first - 1:
            self._begin(state)
        elif self._stopwatch is not None:
            if state.step < self._last:
                self._seconds.append(metrics["seconds"])
            if state.step == self._last - 1:
                self._trace(state)
            if state.step == self._last:
                self._finish(state)

    def on_end(self, state: RunState, metrics: Metrics) -> None:
        """Stop measuring if the run ends early."""
        if self._stopwatch is None:
            return
        # After another failure, the GPU may wait for a process that is gone, and the profiler would
        # wait for the GPU.
        if state.failure is None or isinstance(state.failure, TrainingStopped):
            self._abandon(state)
        if state.failure is None:
            console.line(f"{self._shown()} are not profiled, because the run stopped after step {state.step:,}")

    def _reason_against(self, state: RunState) -> str | None:
        """Return why the steps cannot be measured from here on; None if they can."""
        if self._last > state.num_steps:
            return f"the run ends after step {state.num_steps:,}"
        # The first step after a start builds and compiles.
        if state.step >= self._first - (0 if self._has_trained else 1):
            return f"training starts after step {state.step:,}; set profile.steps to later ones"
        return None

    def _shown(self) -> str:
        return f"Steps {self._first:,} to {self._last:,}"

    def _begin(self, state: RunState) -> None:
        self._seconds.clear()
        self._stopwatch = Stopwatch(torch.device(state.model.mesh.device_type))
        state.model.activity.listener = self._stopwatch

    def _trace(self, state: RunState) -> None:
        assert state.optimizer is not None
        device = torch.device(state.model.mesh.device_type)
        self._tracer = Tracer(state.model, state.optimizer, device, self._last)
        state.model.activity.listener = self._tracer

    def _abandon(self, state: RunState) -> None:
        if self._stopwatch is not None:
            state.model.activity.listener = None
        if self._tracer is not None:
            self._tracer.close()
        self._stopwatch = self._tracer = None

    def _finish(self, state: RunState) -> None:
        assert self._stopwatch is not None
        assert self._tracer is not None
        pipeline, directory = state.model, Path(state.config.run_directory)
        pipeline.activity.listener = None
        # Writing may take longer than a step.
        pipeline.activity.begin("profile")
        seconds = gather_objects(tuple(self._seconds))[0]
        median = self._first + seconds.index(median_low(seconds))
        traced, problem = self._write(directory)
        lane = _lane(pipeline, self._stopwatch.spans(median))
        answers = gather_objects(_Found(problem, traced, lane))
        self._abandon(state)
        self._is_awaited, self._is_done = False, True
        if problem is None and state.is_first_rank and all(answer.problem is None for answer in answers):
            problem = self._summarize(directory, seconds, answers)
        if problem is not None:
            state.report_problem(problem)

    def _write(self, run_directory: Path) -> tuple[TracedStep | None, Problem | None]:
        """Write the files of this process."""
        assert self._tracer is not None
        directory, rank = run_directory / PROFILE_NAME, dist.get_rank()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            trace, memory = directory / f"trace-rank-{rank}.json.gz", directory / f"memory-rank-{rank}.pickle"
            return self._tracer.write(trace, memory), None
        except (OSError, ValueError) as error:
            return None, _not_written(directory, error)

    def _summarize(self, run_directory: Path, seconds: tuple[float, ...], answers: list[_Found]) -> Problem | None:
        """Write and show what all processes have found."""
        traced = [answer.traced for answer in answers if answer.traced is not None]
        lanes = [answer.lane for answer in answers if answer.lane is not None]
        begin = min(lane.spans[0].begin_seconds for lane in lanes)
        summary = ProfileSummary(
            steps=(self._first, self._last),
            step_seconds=seconds,
            ranks=tuple(ProfiledRank(rank, one.peak_bytes, one.messages) for rank, one in enumerate(traced)),
            timeline=Timeline(tuple(_since(begin, lane) for lane in lanes)),
        )
        path = summary_path(run_directory)
        try:
            write_atomically(path, json.dumps(summary.to_json()))
        except OSError as error:
            return _not_written(path.parent, error)
        show_profile(summary, [one.exposed_seconds for one in traced], path.parent)
        return None


def _not_written(directory: Path, error: OSError | ValueError) -> Problem:
    reason = reason_of(error) if isinstance(error, OSError) else "the trace is incomplete"
    return Problem(
        f"cannot write the profile into {shown_path(directory)}: {reason}, so training stopped",
        "free disk space, or leave out profile.steps, then start the run again; it resumes from its newest checkpoint",
    )


def _lane(pipeline: Pipeline, spans: list[Span]) -> Lane | None:
    """Return the lane of this process; of many, only the first one of each pp rank has a lane."""
    rank = dist.get_rank()
    if dist.get_world_size() <= MOST_LANES:
        return Lane(f"rank {rank}", tuple(spans))
    if any(axis_rank(pipeline.mesh, axis) for axis in AXES if axis != PP):
        return None
    return Lane(f"pp rank {axis_rank(pipeline.mesh, PP)} (rank {rank})", tuple(spans))


def _since(begin: float, lane: Lane) -> Lane:
    moved = (
        Span(span.kind, span.begin_seconds - begin, span.end_seconds - begin, span.stage, span.microbatch)
        for span in lane.spans
    )
    return Lane(lane.name, tuple(moved))
