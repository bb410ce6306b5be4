"""Everything a person sees while meshtrain works: lines, tables, progress. Only rank 0 shows anything but errors.

Texts are shown as they are: square brackets in a path or a model name are never taken for rich's markup.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
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
}
BAR_METRICS = ("loss", "tokens_per_second", "eval_loss")


@dataclass(frozen=True)
class _Screen:
    rank: int
    console: Console

    @property
    def draws(self) -> bool:
        return self.rank == 0 and self.console.is_terminal and not self.console.is_dumb_terminal

    def show(self, renderable: RenderableType, soft_wrap: bool = False) -> None:
        if self.rank == 0:
            self.console.print(renderable, soft_wrap=soft_wrap)


def _screen_of(rank: int) -> _Screen:
    # A log is no terminal: it has no width, and rich would fold tables at 80 columns.
    return _Screen(rank, Console(width=None if sys.stdout.isatty() else LOG_COLUMNS))


_screen = _screen_of(rank=0)


def configure(*, rank: int = 0) -> None:
    """Say which rank this process is: only rank 0 shows anything but errors."""
    global _screen
    _screen = _screen_of(rank)


def line(text: str) -> None:
    """Show a line, as long as it is; above the progress bar, if there is one."""
    _screen.show(Text(text), soft_wrap=True)


def has_colours() -> bool:
    """Tell whether styles can be seen."""
    return _screen.draws and not _screen.console.no_color


def styled(segments: Iterable[tuple[str, str]]) -> None:
    """Show texts one after another, each with a style of rich."""
    _screen.show(Text.assemble(*segments), soft_wrap=True)


def warning(text: str) -> None:
    """Show a line that starts with `warning:` on standard error."""
    if _screen.rank == 0:
        _show_on_standard_error(f"warning: {text}")


def error_lines(problems: Iterable[str]) -> None:
    """Show each problem on standard error, in a line that starts with `error:`; other ranks than 0 say who they are."""
    speaker = f"rank {_screen.rank}: " if _screen.rank else ""
    for problem in problems:
        _show_on_standard_error(f"error: {speaker}{problem}")


def stop_lines(lines: Sequence[str]) -> None:
    """Show on standard error why this process stops, whatever its rank: a line, and lines that belong to it."""
    # In one piece: all processes say it at the same time.
    sys.stderr.write("".join(f"{text}\n" for text in [f"rank {_screen.rank} stops: {lines[0]}", *lines[1:]]))


def _show_on_standard_error(text: str) -> None:
    # Through sys.stderr, not through a rich console: while a bar is drawn, rich puts these lines above it.
    sys.stderr.write(" ".join(text.splitlines()) + "\n")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Show a table; columns of numbers (and numbers with units) are flush right."""
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
    """Show how far a job of known size is: as a bar, or as a line now and then where nothing can be drawn.

    Args:
        description: of the job, in a word or two.
        total: its size, in bytes, shards or steps.
        unit: "MB" when sizes are bytes.

    Yields:
        a function that takes what was done since its last call, in the same unit.
    """
    scale, digits = (BYTES_PER_MB, 1) if unit == "MB" else (1, 0)
    left = _TimeLeft(total)
    pace = _Pace(SECONDS_BETWEEN_LINES)
    done = 0

    def told(eta: str) -> tuple[str, ...]:
        return (f"{left.per_second(done) / scale:,.1f} MB/s", eta) if unit == "MB" and eta else (eta,)

    def advance(amount: int) -> None:
        nonlocal done
        done += amount
        size = f"{done / scale:,.{digits}f}/{total / scale:,.{digits}f} {unit}"
        if bar is not None:
            bar.draw(done, description, _joined(size, *told(left.at(done))))
        elif pace.is_due() or done >= total:
            line(_joined(description, size, *told(left.at(done))))

    with _Bar(total) if _screen.draws else nullcontext() as bar:
        yield advance


class TrainingProgress:
    """Shows where training is: a bar on a terminal, elsewhere a line now and then; a context manager.

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
        """Show what is known after a step; an evaluation is always worth a line.

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
            line(_joined(steps, *_formatted(metrics, METRIC_FORMATS)))
        elif self._bar is None and (step % self._every == 0 or step == self._total_steps):
            line(_joined(steps, *_formatted(metrics, METRIC_FORMATS), left))


def _formatted(metrics: Mapping[str, float], names: Iterable[str]) -> list[str]:
    return [METRIC_FORMATS[name].format(metrics[name]) for name in names if name in metrics]


def _joined(*words: str) -> str:
    return "  ".join(word for word in words if word)


class _Bar:
    """A bar between two texts.

    Drawn only when something happens: rich's own refresh thread would be alive when a loader or a tokenizer forks.
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
    """Tells when the next frame or line is due; the first is due at once."""

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
    """The time that a job will still take, from the pace since its first report (what came before is start-up)."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._first: tuple[int, float] | None = None

    def per_second(self, done: int) -> float:
        """Return the pace, once `at` tells something."""
        assert self._first is not None
        return (done - self._first[0]) / (time.monotonic() - self._first[1])

    def at(self, done: int) -> str:
        """Return `eta 1:12`, or nothing while there is no telling or nothing left."""
        now = time.monotonic()
        if self._first is None:
            self._first = (done, now)
        first_done, started = self._first
        if not first_done < done < self._total:
            return ""
        minutes, seconds = divmod(round((now - started) / (done - first_done) * (self._total - done)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"eta {hours}:{minutes:02}:{seconds:02}" if hours else f"eta {minutes}:{seconds:02}"
