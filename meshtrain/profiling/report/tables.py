"""The tables of a report. The screen and the page show the same ones."""

from collections.abc import Sequence
from pathlib import Path

from meshtrain.config.reading import shown_path
from meshtrain.pictures.scales import Quantity, shown_value
from meshtrain.pictures.tables import Table
from meshtrain.profiling.report.figures import (
    PartOfTime,
    last_step,
    mfu,
    num_steps,
    numbers,
    parts_of_time,
    peak_memory,
    typical,
)
from meshtrain.profiling.report.recorded import BACKGROUND_SECONDS, CHECKPOINT_SECONDS, Metrics, RecordedRun
from meshtrain.training.files import SAVED_KEY

MOST_ROWS = 12
"""Rows of steps and evaluations that are shown at most, spread over the run."""
MOST_EVENTS = 20
"""Checkpoints, starts and bad steps that are shown at most, the latest ones."""
MOST_SAMPLES = 8


def shown(value: float | None, quantity: Quantity = "number") -> str:
    """Return a value, or nothing if it is not known."""
    return "" if value is None else shown_value(value, quantity)


def spread(rows: Sequence[Metrics]) -> list[Metrics]:
    """Return a few rows, spread evenly, with the first and the last."""
    if len(rows) <= MOST_ROWS:
        return list(rows)
    return [rows[round(index * (len(rows) - 1) / (MOST_ROWS - 1))] for index in range(MOST_ROWS)]


def key_figures(run: RecordedRun) -> dict[str, str]:
    """Return the most important values of a run by name, without those that are unknown."""
    total = num_steps(run)
    evaluations = numbers(run.evaluations, "eval_loss")
    losses = numbers(run.steps, "loss")
    share = mfu(run)
    found = {
        "model": _model(run),
        "mesh": _mesh(run),
        "state": _state(run),
        "steps": f"{last_step(run):,}" + (f" of {total:,}" if total else ""),
        "tokens": shown(max(numbers(run.steps, "tokens"), default=None)),
        "loss": f"{losses[-1]:.4f}" if losses else "",
        "evaluation loss": f"{evaluations[-1]:.4f}" if evaluations else "",
        "tokens/s": shown(typical(run, "tokens_per_second")),
        "TFLOP/s per process": shown(typical(run, "teraflops_per_second")),
        "MFU": "" if share is None else f"{share:.1%}",
        "time of a step": shown(typical(run, "seconds"), "seconds"),
        "peak memory": shown(peak_memory(run), "bytes"),
        "restarts": str(len(run.starts) - 1) if run.starts else "",
        "bad steps": str(len(run.bad_steps)) if run.bad_steps else "",
    }
    return {name: value for name, value in found.items() if value}


def _model(run: RecordedRun) -> str:
    model = run.run.get("model", {})
    return str(model.get("path") or model.get("type") or "")


def _mesh(run: RecordedRun) -> str:
    degrees = run.plan.get("mesh", {})
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree != 1) or (
        "one process" if degrees else ""
    )


def _state(run: RecordedRun) -> str:
    if run.failure is not None:
        return "failed"
    total = num_steps(run)
    return "" if total is None else "done" if last_step(run) >= total else "not done"


def tables(run: RecordedRun) -> list[Table]:
    """Return the tables of a run that have rows."""
    found = [
        _steps(run),
        _evaluations(run),
        _time(parts_of_time(run)),
        _checkpoints(run),
        _starts(run),
        _bad_steps(run),
    ]
    return [table.without_empty_columns() for table in found if table.rows]


def _steps(run: RecordedRun) -> Table:
    rows = tuple(
        (
            f"{row['step']:,}",
            _loss(row.get("loss")),
            shown(row.get("grad_norm")) or "not finite",
            shown(row.get("learning_rate")),
            shown(row.get("tokens_per_second")),
            shown(row.get("teraflops_per_second")),
            shown(row.get("seconds"), "seconds"),
            shown(row.get("memory_bytes"), "bytes"),
        )
        for row in spread(run.steps)
    )
    columns = ("step", "loss", "gradient norm", "learning rate", "tokens/s", "TFLOP/s per process", "time", "memory")
    return Table("Steps", columns, rows)


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _evaluations(run: RecordedRun) -> Table:
    rows = tuple(
        (
            f"{row['step']:,}",
            _loss(row["eval_loss"]),
            *(_loss(row.get(name)) for name in run.further_evaluations),
            shown(row.get("evaluation_seconds"), "seconds"),
        )
        for row in spread(run.evaluations)
    )
    columns = ("step", "loss", *run.further_evaluations.values(), "time")
    return Table("Evaluations", columns, rows)


def _time(parts: Sequence[PartOfTime]) -> Table:
    whole = sum(part.seconds for part in parts) or 1.0
    rows = tuple(
        (
            part.name,
            shown(part.seconds, "seconds"),
            f"{part.seconds / whole:.1%}",
            f"{part.number:,}",
            shown(part.typical, "seconds"),
        )
        for part in parts
    )
    return Table("Time by part", ("part", "in all", "share", "times", "median"), rows)


def _checkpoints(run: RecordedRun) -> Table:
    rows = tuple(
        (
            f"{row['step']:,}",
            shown(row.get(CHECKPOINT_SECONDS), "seconds"),
            shown(row.get(BACKGROUND_SECONDS), "seconds"),
            *_stored(run, row.get(SAVED_KEY)),
        )
        for row in run.saves[-MOST_EVENTS:]
    )
    title = _latest("Checkpoints", len(run.saves))
    return Table(title, ("step", "training waited", "in the background", "size", "where"), rows)


def _latest(name: str, number: int) -> str:
    return name if number <= MOST_EVENTS else f"{name}, the latest {MOST_EVENTS} of {number:,}"


def _stored(run: RecordedRun, location: str | None) -> tuple[str, str]:
    """Return size and place of a checkpoint, as far as they can be seen from here."""
    if location is None:
        return "", "not complete"
    if "://" in location:
        return "", location
    written = Path(location)
    # A run directory may have been copied from another machine.
    copied = run.directory / written.parent.name / written.name
    here = next((path for path in (written, copied) if path.is_dir()), None)
    if here is None:
        return "", "removed, or on another machine"
    num_bytes = sum(path.stat().st_size for path in here.rglob("*") if path.is_file())
    return shown(num_bytes, "bytes"), shown_path(here)


def _starts(run: RecordedRun) -> Table:
    rows = tuple(
        (str(number), f"{start['step']:,}", str(start["parameters_checksum"]))
        for number, start in [*enumerate(run.starts, start=1)][-MOST_EVENTS:]
    )
    return Table(_latest("Starts", len(run.starts)), ("start", "after step", "checksum of the parameters"), rows)


def _bad_steps(run: RecordedRun) -> Table:
    rows = tuple(
        (f"{bad['bad_step']:,}", bad.get("answer", ""), bad.get("fault", ""), _samples(bad.get("samples") or []))
        for bad in run.bad_steps[-MOST_EVENTS:]
    )
    return Table(_latest("Bad steps", len(run.bad_steps)), ("step", "answer", "fault", "samples"), rows)


def _samples(samples: Sequence[int]) -> str:
    more = ", ..." if len(samples) > MOST_SAMPLES else ""
    return ", ".join(map(str, samples[:MOST_SAMPLES])) + more
