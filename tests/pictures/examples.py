"""Data for drawings: a small and a large one of each kind."""

import math
import random

from meshtrain.pictures.line_chart import Event, LineChart, Series
from meshtrain.pictures.memory import MEMORY_STYLES, MemoryBar, MemoryCurve, Moment
from meshtrain.pictures.mesh_grid import MeshGrid
from meshtrain.pictures.message_bars import Messages
from meshtrain.pictures.timeline import Kind, Lane, Span, Timeline

GIB = 2**30
MESH = MeshGrid(
    holds=("stage 0: embedding, layers 0-11", "stage 1: layers 12-23, final norm, head and loss"),
    axes=(("dp_replicate", 1), ("dp_shard", 2), ("tp", 2)),
)
LARGE_MESH = MeshGrid(
    holds=tuple(f"stage {stage}: layers {5 * stage}-{5 * stage + 4}" for stage in range(16)),
    axes=(("dp_replicate", 4), ("dp_shard", 4), ("tp", 8)),
)
MESSAGES = (
    Messages("tp", "all_reduce", 192, 12 * GIB, 0.081),
    Messages("dp_shard", "all_gather_into_tensor", 48, 6 * GIB, 0.034),
    Messages("dp_shard", "reduce_scatter_tensor", 24, 3 * GIB, 0.02),
    Messages("pp", "send", 32, GIB // 4, None),
)


def pipeline(num_ranks: int, num_microbatches: int, *, unit: float = 0.01) -> Timeline:
    """Return GPipe with split backward passes: all forward passes, then all backward passes."""
    lanes = []
    for rank in range(num_ranks):
        spans: list[Span] = []

        def add(
            kind: Kind, begin: float, length: float, microbatch: int | None, rank: int = rank, spans: list[Span] = spans
        ) -> None:
            # With as many digits as files have.
            end = round((begin + length) * unit, 9)
            spans.append(Span(kind, round(begin * unit, 9), end, None if microbatch is None else rank, microbatch))

        for one in range(num_microbatches):
            add("forward", rank + one * 1.1, 1, one)
            add("send", rank + one * 1.1 + 1, 0.1, one)
        begin = num_ranks + num_microbatches * 1.1 + (num_ranks - 1 - rank) * 1.2
        add("wait", rank + num_microbatches * 1.1, begin - rank - num_microbatches * 1.1, None)
        for one in range(num_microbatches):
            add("input gradient", begin + one * 2.2, 1.2, one)
            add("weight gradient", begin + one * 2.2 + 1.2, 1, one)
        end = num_ranks * 2.2 + num_microbatches * 3.3
        add("gradients", end, 1.5, None)
        add("optimizer", end + 1.5, 0.8, None)
        lanes.append(Lane(f"pp rank {rank}", tuple(spans)))
    return Timeline(tuple(lanes))


def memory_bars(number: int) -> tuple[MemoryBar, ...]:
    """Return bars of which the first need more than 80 GiB."""
    return tuple(
        MemoryBar(
            f"ranks {rank * 8}-{rank * 8 + 7}",
            {
                part: int(GIB * size * (1.0 - 0.3 * rank / number))
                for part, size in zip(MEMORY_STYLES, (12, 3, 12, 2, 24, 21, 4, 1, 2.5, 1.5, 3), strict=True)
            },
            f"backward of microbatch {rank}, stage {rank}",
        )
        for rank in range(number)
    )


def memory_curve(num_moments: int) -> MemoryCurve:
    """Return memory that grows in the forward and shrinks in the backward passes."""
    moments = []
    for index in range(num_moments):
        phase = index / num_moments
        parts = {"parameters": 12 * GIB, "optimizer": 24 * GIB, "gradients": 12 * GIB if phase > 0.5 else 0}
        parts["activations"] = int(30 * GIB * (1 - abs(2 * phase - 1)))
        parts["gathered"] = int(2 * GIB * (index % 3))
        moments.append(Moment(phase, f"forward of microbatch {index}, stage 0, layer {index % 24}", parts))
    return MemoryCurve("ranks 0-7", tuple(moments), 1.0, "seconds", 80 * GIB)


def losses(num_steps: int, *, is_log: bool = False) -> LineChart:
    """Return a chart of training and evaluation with gaps, restarts and bad steps."""
    draw = random.Random(0)
    training = tuple(
        (step, None if step % 97 == 0 else 2 + 8 * math.exp(-step / num_steps * 4) + draw.gauss(0, 0.1))
        for step in range(1, num_steps + 1)
    )
    every = max(1, num_steps // 10)
    evaluation = tuple((step, value and value + 0.3) for step, value in training[every - 1 :: every])
    events = (
        Event(num_steps // 3, "restart", f"Start after step {num_steps // 3}"),
        Event(num_steps // 2, "bad step", f"Bad step {num_steps // 2}"),
        *(Event(step, "checkpoint", f"Checkpoint of step {step}") for step in range(every, num_steps, every)),
    )
    return LineChart(
        "Loss",
        (Series("training", training), Series("evaluation", evaluation)),
        "nats per token",
        events=events,
        is_log=is_log,
    )
