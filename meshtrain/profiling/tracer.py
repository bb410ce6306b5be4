"""The trace of one step: what torch's profiler sees, the messages and the memory."""

import gzip
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function

from meshtrain.compat.cuda import end_memory_record, record_memory, write_memory_record
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.planning.simulation.rank import group_axes
from meshtrain.profiling.files import ProfiledMessages
from meshtrain.profiling.messages import (
    MarkedMessages,
    Message,
    exposed_seconds,
    gloo_messages,
    nccl_messages,
    summed,
)
from meshtrain.profiling.peak import peaks_on_cpu, storage_bytes
from meshtrain.profiling.trace import Event, busy_on_cpu, busy_on_gpu, sections_named
from meshtrain.runtime.activity import Activity

FIRST_PHASE, LAST_PHASE = "data", "metrics"
"""The traced step begins with the first of these phases, and ends with the last."""


@dataclass(frozen=True)
class TracedStep:
    """What a trace says about one process in a step.

    Attributes:
        peak_bytes: the most bytes of the device that were in use at once.
        messages: by axis and operator.
        exposed_seconds: axis -> seconds in which messages were under way and nothing was computed.
    """

    peak_bytes: int
    messages: tuple[ProfiledMessages, ...]
    exposed_seconds: dict[str, float]


class Tracer:
    """Listens to an activity, and traces one step, with a range for each phase of it.

    Args:
        pipeline: that computes.
        optimizer: whose state was there before the step.
        device: that computes.
        step: to be traced, counted from 1.
    """

    def __init__(self, pipeline: Pipeline, optimizer: Optimizer, device: torch.device, step: int) -> None:
        self._pipeline, self._optimizer, self._device, self._step = pipeline, optimizer, device, step
        self._running = ExitStack()
        self._range = ExitStack()
        self._is_running = False
        self._marks = MarkedMessages(group_axes(pipeline))
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
            record_shapes=True,
            profile_memory=not self._on_gpu,
        )
        self._held_bytes = self._peak_bytes = 0

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @property
    def _name(self) -> str:
        return f"step {self._step}"

    def __call__(self, activity: Activity) -> None:
        """Begin or end the trace, or a range of it."""
        if activity.step != self._step:
            return
        if activity.phase == FIRST_PHASE:
            self._begin()
        elif self._is_running:
            self._range.close()
            if activity.phase == LAST_PHASE:
                self._end()
            elif not activity.phase.startswith("after "):
                # torch's schedules have ranges of their own around a pass. A range that began after
                # a pass, inside of theirs, would end outside.
                self._range.enter_context(record_function(_described(activity)))

    def close(self) -> None:
        """End the trace, if the step has not ended it."""
        if self._is_running:
            self._range.close()
            self._end()
        if self._on_gpu:
            end_memory_record()

    def write(self, trace: Path, memory: Path) -> TracedStep:
        """Write the trace and, on a GPU, the memory record of the step; return what they say.

        Args:
            trace: path that ends in ".json.gz".
            memory: path of the memory record.

        Raises:
            OSError: if a file cannot be written.
            ValueError: if the file of the trace is incomplete.
        """
        if self._on_gpu:
            write_memory_record(memory)
        return self._read(_written(self._profiler, trace))

    def _begin(self) -> None:
        self._held_bytes = storage_bytes(_kept(self._pipeline, self._optimizer))
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            record_memory()
        self._is_running = True
        self._running.enter_context(self._profiler)
        self._running.enter_context(record_function(self._name))
        # A mode makes compiled layers run without compilation, from then on.
        if not (self._on_gpu or self._pipeline.plan.compile.enabled):
            self._running.enter_context(self._marks)

    def _end(self) -> None:
        self._is_running = False
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            self._peak_bytes = torch.cuda.max_memory_allocated(self._device)
        self._running.close()

    def _read(self, events: list[Event]) -> TracedStep:
        (section,) = sections_named(events, self._name)
        if self._on_gpu:
            peak, busy = self._peak_bytes, busy_on_gpu(events)
            messages: list[Message] = nccl_messages(events, section, group_axes(self._pipeline))
        else:
            (peak,) = peaks_on_cpu(events, [section], held_bytes=self._held_bytes)
            busy, messages = busy_on_cpu(events, section.thread), gloo_messages(events, self._marks.messages)
        return TracedStep(peak, summed(messages), exposed_seconds(messages, busy))


def _written(profiler: profile, path: Path) -> list[Event]:
    """Write a trace, and return its events."""
    plain = path.with_suffix("")
    try:
        profiler.export_chrome_trace(str(plain))
        content = plain.read_bytes()
    finally:
        plain.unlink(missing_ok=True)
    events = json.loads(content)["traceEvents"]
    path.write_bytes(gzip.compress(content))
    return [event for event in events if "name" in event]


def _described(activity: Activity) -> str:
    if activity.microbatch is None:
        return activity.phase if activity.stage is None else f"{activity.phase}, stage {activity.stage}"
    return f"{activity.phase}, stage {activity.stage}, microbatch {activity.microbatch}"


def _kept(pipeline: Pipeline, optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the tensors that are there before and after a step.

    Those of gradients are freed before its first pass.
    """
    yield from (parameter for _, parameter in pipeline.named_parameters())
    yield from (buffer for stage in pipeline.stages for buffer in stage.model.buffers())
    yield from (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
