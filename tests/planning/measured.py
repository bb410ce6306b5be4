"""What a real run of a plan allocates and sends, measured on ranks."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from meshtrain.compat.autograd import OperatorMode
from meshtrain.models.layout import local_tensor
from meshtrain.planning.calibration.overhead import build_real
from meshtrain.planning.simulation.rank import group_axes
from meshtrain.planning.simulation.recorder import Recorder
from meshtrain.planning.simulation.run import SimulatedRun
from meshtrain.planning.totals import Totals, totals_of
from meshtrain.profiling.peak import peaks_on_cpu
from meshtrain.profiling.trace import sections_named
from meshtrain.training.step import train_step

STEP, STEPS = "measured step", 3
PAUSE = 0.01
MESSAGES = ("c10d", "_c10d_functional")
BETWEEN_TWO = ("send", "recv_")


class _Patience(OperatorMode):
    """Waits for each message, and for gloo's threads to let go of its tensors.

    The profiler counts what these threads free as held for ever. A process that sends waits for
    nothing: the other one may have to receive something first.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in MESSAGES:
            return func(*args, **(kwargs or {}))
        time.sleep(PAUSE)
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and func.overloadpacket.__name__ not in BETWEEN_TWO:
            work = result[-1] if isinstance(result, tuple) else result
            work.wait()
        time.sleep(PAUSE)
        return result


@dataclass(frozen=True)
class Measured:
    """The step of one process.

    Attributes:
        peak_bytes: that the allocator of the CPU had handed out at once during the step.
        state_bytes: of parameters, gradients and optimizer state.
        totals: its messages and floating-point operations.
    """

    peak_bytes: int
    state_bytes: tuple[int, int, int]
    totals: Totals


def measure(run: SimulatedRun) -> Measured:
    """Return what a step of a run does on this rank, and how much memory it needs.

    torch's profiler counts what the allocator hands out and takes back, tensors or not. gloo may
    free a tensor late, so the lowest peak of a few steps counts.
    """
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, _Patience():
            context, batch = build_real(run, torch.device("cpu"))
            if run.batch.separates:
                # Documents of 16 to 48 tokens.
                positions = torch.cat([torch.arange(length) for length in (16, 40, 24, 48)])
                batch["position_ids"] = positions.expand_as(batch["labels"])
            ids = np.arange(run.batch.global_batch_size)
            train_step(context, 0, batch, ids)
            for step in range(1, 1 + STEPS):
                with record_function(STEP):
                    train_step(context, step, batch, ids)
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
        peak = min(peaks_on_cpu(events, sections_named(events, STEP)))
    recorder = Recorder(group_axes(context.pipeline), answers=False)
    with recorder:
        train_step(context, 1 + STEPS, batch, ids)
    parameters = [p for _, p in context.pipeline.named_parameters()]
    gradients = [p.grad for p in parameters if p.grad is not None]
    states = [v for s in context.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return Measured(peak, (_size(parameters), _size(gradients), _size(states)), totals_of(recorder.work()))


def _size(tensors: list[Any]) -> int:
    return sum(local.numel() * local.element_size() for local in map(local_tensor, tensors))
