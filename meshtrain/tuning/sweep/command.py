"""What `meshtrain sweep` does."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT

from meshtrain import console
from meshtrain.config.reading import shown_path
from meshtrain.data.cache import write_atomically
from meshtrain.runtime.apart import commands_in_turn
from meshtrain.runtime.exit_codes import INTERRUPTED, RESTART, RUN_FAILED
from meshtrain.tuning.sweep.choices import combinations, read_choices
from meshtrain.tuning.sweep.comparison import comparison_table, sentences, sweep_page
from meshtrain.tuning.sweep.outcome import Outcome, read_outcomes
from meshtrain.tuning.sweep.runs import SweepRun, check_runs, read_runs, write_run_files
from meshtrain.tuning.sweep.slurm import array_script

PAGE_NAME, SCRIPT_NAME = "sweep.html", "sweep.sh"


@dataclass(frozen=True)
class Sweep:
    """A sweep: its runs, and those of them that are not done."""

    runs: list[SweepRun]
    remaining: list[SweepRun]

    @property
    def directory(self) -> Path:
        """Return the directory in which the run directories are."""
        return self.runs[0].directory.parent


def prepare(run: Path, lines: Sequence[str], directory: Path | None, world_size: int | None) -> Sweep:
    """Read the runs of a sweep, check those that are not done, and write their run files.

    Args:
        run: the run file.
        lines: `key=[value, ...]`.
        directory: in which the run directories are; None: the `run_directory` of the run file.
        world_size: number of processes of each run; None: the number that its plan needs.

    Raises:
        UserError: with every problem. Nothing is written then.
    """
    runs = read_runs(run, combinations(read_choices(lines)), directory)
    remaining = [one.run for one in read_outcomes(runs, {}) if one.state != "done"]
    check_runs(runs, remaining, world_size)
    write_run_files(runs)
    return Sweep(runs, remaining)


def train(sweep: Sweep, processes: int | None) -> int:
    """Train the runs that are not done, one after another, and show how all of them compare.

    Args:
        sweep: its runs.
        processes: number of processes of each run; None: the run is a process alone.

    Returns:
        The exit code: 1 if a run has failed; 75 or 130 if one was asked to stop.
    """
    started = [] if processes is None else ["--processes", str(processes)]
    codes: dict[str, int] = {}
    with commands_in_turn() as commands:
        for number, run in enumerate(sweep.remaining, start=1):
            if commands.asked is not None:
                break
            console.line(f"== Run {number} of {len(sweep.remaining)}: {run.name}")
            command = [sys.executable, "-u", "-m", "meshtrain", "train", str(run.file), *started]
            codes[run.name] = commands.run(command)
    outcomes = _show(sweep, codes)
    if commands.asked is not None:
        console.line("Stopped; the same command goes on with the runs that are not done")
        return INTERRUPTED if commands.asked == SIGINT else RESTART
    if any(one.has_failed_now for one in outcomes):
        return RUN_FAILED
    return RESTART if RESTART in codes.values() else 0


def write_script(sweep: Sweep, processes: int | None) -> None:
    """Write the script of an array job for the runs that are not done, and show what there is.

    Args:
        sweep: its runs.
        processes: number of processes on each node; None: one for each GPU.
    """
    _show(sweep, {})
    if not sweep.remaining:
        console.line("Nothing to do: all runs are done")
        return
    script = sweep.directory / SCRIPT_NAME
    write_atomically(script, array_script(sweep.remaining, processes, script))
    console.line(f"{len(sweep.remaining)} runs to train. Submit them from the root of the repository, for example by:")
    console.line(f"sbatch --nodes 1 --gpus-per-node 8 --time 12:00:00 {shlex.quote(shown_path(script))}")


def _show(sweep: Sweep, codes: dict[str, int]) -> list[Outcome]:
    """Print how the runs compare, and write the page."""
    outcomes = read_outcomes(sweep.runs, codes)
    table = comparison_table(outcomes)
    console.table(table.title, table.columns, table.rows)
    for sentence in sentences(outcomes):
        console.line(sentence)
    page = sweep.directory / PAGE_NAME
    write_atomically(page, sweep_page(outcomes))
    console.line(f"Page: {shown_path(page)}")
    return outcomes
