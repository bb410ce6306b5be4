"""What the user sees while meshtrain works: lines, tables and progress.

Only rank 0 prints anything but errors. Text is printed as it is: square brackets in a path or a
model name are never read as rich's markup.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

LOG_COLUMNS = 160
SECONDS_BETWEEN_FRAMES = 0.1
SECONDS_BETWEEN_LINES = 5.0
BYTES_PER_MB = 1_000_000

METRIC_FORMATS = {
    "loss": "loss {:.3f}",
    "learning_rate": "lr {:.1e}",
    "grad_norm": "norm {:.2f}",
    "tokens_per_second": "{:,.0f} tok/s",
    "eval_loss": "eval loss {:.3f}",
    "eval_loss_ema": "of the average {:.3f}",
}
BAR_METRICS = ("loss", "tokens_per_second", "eval_loss")


@dataclass(frozen=True)
class _Screen:
    rank: int
    console: Console
    has_only_progress: bool = False

    @property
    def draws(self) -> bool:
        return self.rank == 0 and self.console.is_terminal and not self.console.is_dumb_terminal

    def show(self, renderable: RenderableType, soft_wrap: bool = False) -> None:
        if self.rank == 0:
            self.console.print(renderable, soft_wrap=soft_wrap)


def _screen_of(rank: int) -> _Screen:
    # A log is not a terminal and has no width; without one, rich would fold tables at 80 columns.
    return _Screen(rank, Console(width=None if sys.stdout.isatty() else LOG_COLUMNS))


_screen = _screen_of(rank=0)


def configure(*, rank: int = 0) -> None:
    """Set the rank of this process. Only rank 0 prints anything but errors."""
    global _screen
    _screen = replace(_screen_of(rank), has_only_progress=_screen.has_only_progress)


@contextmanager
def only_progress() -> Iterator[None]:
    """Leave out lines and tables while the block runs. Progress, warnings and errors are shown."""
    global _screen
    _screen = replace(_screen, has_only_progress=True)
    try:
        yield
    finally:
        _screen = replace(_screen, has_only_progress=False)


def line(text: str) -> None:
    """Print a line of any length, above the progress bar if there is one."""
    if not _screen.has_only_progress:
        _progress_line(text)


def _progress_line(text: str) -> None:
    _screen.show(Text(text), soft_wrap=True)


def has_colors() -> bool:
    """Return whether styles are visible."""
    return _screen.draws and not _screen.console.no_color


def styled(segments: Iterable[tuple[str, str]]) -> None:
    """Print texts one after another, each with a style of rich."""
    _screen.show(Text.assemble(*segments), soft_wrap=True)


def warning(text: str) -> None:
    """Print a line that starts with `warning:` to standard error."""
    if _screen.rank == 0:
        _show_on_standard_error(f"warning: {text}")


def error_lines(problems: Iterable[str]) -> None:
    """Print each problem to standard error, in a line that starts with `error:`.

    Ranks other than 0 add their number.
    """
    source = f"rank {_screen.rank}: " if _screen.rank else ""
    for problem in problems:
        _show_on_standard_error(f"error: {source}{problem}")


def stop_lines(lines: Sequence[str]) -> None:
    """Print to standard error why this process stops, on every rank: a line and its details."""
    # In one write, because all processes print this at the same time.
    sys.stderr.write("".join(f"{text}\n" for text in [f"rank {_screen.rank} stops: {lines[0]}", *lines[1:]]))


def _show_on_standard_error(text: str) -> None:
    # Through sys.stderr and without a rich console: while a bar is drawn, rich puts these lines
    # above it.
    sys.stderr.write(" ".join(text.splitlines()) + "\n")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; columns of numbers (and numbers with units) are aligned to the right."""
    if _screen.has_only_progress:
        return
    texts = [[str(cell) for cell in row] for row in rows]
    shown = Table(title=Text(title, "bold"), title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, column in enumerate(columns):
        is_number = all(row[index][:1].isdigit() for row in texts)
        shown.add_column(Text(column), justify="right" if is_number else "left", overflow="fold")
    for row in texts:
        shown.add_row(*map(Text, row))
    _screen.show(Padding(shown, (0, 0, 1, 0), expand=False))


@contextmanager
def progress(
    description: str, total: int, *, unit: Literal["MB", "shards", "steps"] = "steps"
) -> Iterator[Callable[[int], None]]:
    """Show the progress of a job of known size: as a bar, or as occasional lines in a log.

    Args:
        description: of the job, one or two words.
        total: size of the job, in bytes, shards or steps.
        unit: "MB" when sizes are bytes.

    Yields:
        a function that takes the amount done since its last call, in the same unit.
    """
    scale, digits = (BYTES_PER_MB, 1) if unit == "MB" else (1, 0)
    left = _TimeLeft(total)
    pace = _Pace(SECONDS_BETWEEN_LINES)
    done = 0

    def rate_and_time(eta: str) -> tuple[str, ...]:
        return (f"{left.per_second(done) / scale:,.1f} MB/s", eta) if unit == "MB" and eta else (eta,)

    def advance(amount: int) -> None:
        nonlocal done
        done += amount
        size = f"{done / scale:,.{digits}f}/{total / scale:,.{digits}f} {unit}"
        if bar is not None:
            bar.draw(done, description, _joined(size, *rate_and_time(left.at(done))))
        elif pace.is_due() or done >= total:
            _progress_line(_joined(description, size, *rate_and_time(left.at(done))))

    with _Bar(total) if _screen.draws else nullcontext() as bar:
        yield advance


class TrainingProgress:
    """Shows the progress of training: as a bar on a terminal, as occasional lines elsewhere.

    It is a context manager.

    Args:
        total_steps: the step at which training ends.
        every: steps between the lines.
    """

    def __init__(self, total_steps: int, *, every: int = 1) -> None:
        self._total_steps = total_steps
        self._every = every
        self._left = _TimeLeft(total_steps)
        self._bar = _Bar(total_steps) if _screen.draws else None
        self._latest: dict[str, float] = {}

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.__exit__()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step. An evaluation always gets a line.

        Args:
            step: optimizer steps done.
            metrics: under the names of metrics.jsonl; those without a format are left out.
        """
        self._latest.update(metrics)
        steps = f"step {step}/{self._total_steps}"
        left = self._left.at(step)
        if self._bar is not None:
            self._bar.draw(step, steps, _joined(*_formatted(self._latest, BAR_METRICS), left))
        if "eval_loss" in metrics:
            _progress_line(_joined(steps, *_formatted(metrics, METRIC_FORMATS)))
        elif self._bar is None and (step % self._every == 0 or step == self._total_steps):
            _progress_line(_joined(steps, *_formatted(metrics, METRIC_FORMATS), left))


def _formatted(metrics: Mapping[str, float], names: Iterable[str]) -> list[str]:
    return [METRIC_FORMATS[name].format(metrics[name]) for name in names if name in metrics]


def _joined(*words: str) -> str:
    return "  ".join(word for word in words if word)


class _Bar:
    """A progress bar between two texts.

    It is drawn by calls only: rich's own refresh thread would be running when a loader or a
    tokenizer forks.
    """

    def __init__(self, total: int) -> None:
        columns = (
            TextColumn("{task.fields[before]}", markup=False),
            BarColumn(None),
            TextColumn("{task.fields[after]}"),
        )
        self._progress = Progress(*columns, console=_screen.console, auto_refresh=False, expand=True)
        self._task = self._progress.add_task("", total=total, before="", after="")
        self._pace = _Pace(SECONDS_BETWEEN_FRAMES)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def draw(self, done: int, before: str, after: str) -> None:
        self._progress.update(self._task, completed=done, before=before, after=after)
        if self._pace.is_due():
            self._progress.refresh()


class _Pace:
    """Limits how often frames or lines are shown; the first is due at once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = 0.0

    def is_due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True


class _TimeLeft:
    """Estimates the remaining time of a job from its pace since the first report.

    Time before the first report is start-up and does not count.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._first: tuple[int, float] | None = None

    def per_second(self, done: int) -> float:
        """Return the pace; only valid after `at` has returned a text."""
        assert self._first is not None
        return (done - self._first[0]) / (time.monotonic() - self._first[1])

    def at(self, done: int) -> str:
        """Return `eta 1:12`, or an empty string while it is unknown or nothing is left."""
        now = time.monotonic()
        if self._first is None:
            self._first = (done, now)
        first_done, started = self._first
        if not first_done < done < self._total:
            return ""
        minutes, seconds = divmod(round((now - started) / (done - first_done) * (self._total - done)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"eta {hours}:{minutes:02}:{seconds:02}" if hours else f"eta {minutes}:{seconds:02}"
