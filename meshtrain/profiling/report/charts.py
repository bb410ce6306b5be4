"""The charts of a report, from the objects of metrics.jsonl."""

from collections.abc import Iterable

from meshtrain.pictures.line_chart import Event, LineChart, Series
from meshtrain.pictures.stacked_bars import Bar, StackedBars
from meshtrain.profiling.files import Prediction
from meshtrain.profiling.report.figures import STEP_PARTS, parts_of_time, peak_tflops, rest_seconds, typical
from meshtrain.profiling.report.recorded import Metrics, RecordedRun
from meshtrain.training.files import SAVED_KEY

TIME_STYLES = {
    "data": "amber",
    "forward and backward": "blue",
    "optimizer": "green",
    "rest of the step": "grey",
    "evaluation": "pink",
    "saving": "violet",
}
"""Part of the time -> style of its area."""
MOST_TIMES = 3
"""End of the axis of times, as a multiple of a typical step. The first steps take longer."""
MOST_SOURCES = 4
"""Sources whose evaluation is drawn at most. The table has all of them."""


def series(name: str, rows: Iterable[Metrics], key: str) -> Series:
    """Return a value over the steps."""
    return Series(name, tuple((row["step"], row[key]) for row in rows if key in row))


def events(run: RecordedRun) -> tuple[Event, ...]:
    """Return what happened: checkpoints, starts but the first, bad steps."""
    saved = [
        Event(row["step"], "checkpoint", f"Checkpoint of step {row['step']:,}") for row in run.saves if SAVED_KEY in row
    ]
    restarts = [Event(row["step"], "restart", f"Started again after step {row['step']:,}") for row in run.starts[1:]]
    bad = [
        Event(row["bad_step"], "bad step", f"Step {row['bad_step']:,} was bad: {row.get('fault', '')}")
        for row in run.bad_steps
    ]
    return (*saved, *restarts, *bad)


def loss_chart(run: RecordedRun) -> LineChart:
    """Return the losses of training and evaluation."""
    lines = [series("training", run.steps, "loss")]
    if run.evaluations:
        lines.append(series("evaluation", run.evaluations, "eval_loss"))
        further = list(run.further_evaluations.items())[:MOST_SOURCES]
        lines += [series(label, run.evaluations, name) for name, label in further]
    return LineChart("Loss", tuple(lines), unit="nats per token", events=events(run))


def optimization_charts(run: RecordedRun) -> list[LineChart]:
    """Return learning rate, gradient norm and, if there is one, loss scale."""
    charts = [
        LineChart("Learning rate", (series("learning rate", run.steps, "learning_rate"),), from_zero=True),
        LineChart("Gradient norm before clipping", (series("gradient norm", run.steps, "grad_norm"),), is_log=True),
        LineChart("Loss scale", (series("loss scale", run.steps, "loss_scale"),), is_log=True),
        LineChart("Loss of the router", (series("loss of the router", run.steps, "router_aux_loss"),)),
        LineChart("z-loss of the router", (series("z-loss of the router", run.steps, "router_z_loss"),)),
        LineChart(
            "Most tokens of an expert, relative to the mean of its layer",
            (series("imbalance of experts", run.steps, "expert_imbalance"),),
        ),
    ]
    return [chart for chart in charts if chart.series[0].points]


def speed_charts(run: RecordedRun) -> list[LineChart]:
    """Return tokens per second, TFLOP/s and MFU, the time of a step and its parts."""
    peak = peak_tflops(run)
    rates = series("TFLOP/s", run.steps, "teraflops_per_second")
    shares = Series("MFU", tuple((step, rate and peak and rate / peak * 100) for step, rate in rates.points))
    whole = series("step", run.steps, "seconds")
    parts = [series(name, run.steps, key) for name, key in STEP_PARTS.items()]
    parts.append(Series("rest", tuple((row["step"], rest_seconds(row)) for row in run.steps)))
    step = typical(run, "seconds")
    most = None if step is None else MOST_TIMES * step
    found = [
        LineChart("Tokens per second", (series("tokens/s", run.steps, "tokens_per_second"),), from_zero=True),
        LineChart("TFLOP/s of each process", (rates,), from_zero=True),
        *([LineChart("MFU", (shares,), unit="% of the peak rate", from_zero=True)] if peak else []),
        LineChart("Time of a step", (whole,), quantity="seconds", from_zero=True, most=most),
        LineChart("Time of a step by part", tuple(parts), quantity="seconds", from_zero=True, most=most),
    ]
    return [chart for chart in found if any(one.points for one in chart.series)]


def memory_chart(run: RecordedRun) -> LineChart:
    """Return the memory of the process that has used the most."""
    line = series("memory", run.steps, "memory_bytes")
    return LineChart("Most memory of a process so far", (line,), quantity="bytes", from_zero=True)


def time_bars(run: RecordedRun) -> StackedBars:
    """Return the time of the run by part, as one bar."""
    sizes = {part.name: part.seconds for part in parts_of_time(run)}
    return StackedBars("Time of the run by part", (Bar("run", sizes),), TIME_STYLES, "seconds")


def peak_bars(prediction: Prediction, measured: dict[int, int]) -> StackedBars:
    """Return the predicted peak of each pp rank, above the measured one if there is one."""
    bars = []
    for pp_rank, predicted in enumerate(prediction.peak_bytes):
        bars.append(Bar(f"pp rank {pp_rank}", {"predicted": predicted}))
        if pp_rank in measured:
            bars.append(Bar("", {"measured": measured[pp_rank]}))
    styles = {"predicted": "blue", "measured": "vermillion"}
    limit = prediction.limit_bytes or None
    return StackedBars("Peak memory by pp rank", tuple(bars), styles, "bytes", limit)
