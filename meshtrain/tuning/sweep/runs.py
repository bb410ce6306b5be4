"""The runs of a sweep, and the check of all of them before any begins."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from meshtrain.api.check import check_run
from meshtrain.config.reading import absolute_path, shown_path
from meshtrain.config.run import RunConfig
from meshtrain.config.toml import dump_toml, load_run
from meshtrain.data.cache import write_atomically
from meshtrain.errors import ConfigError, Problem, UserError, name_some, reason_of
from meshtrain.training.directory import check_directory
from meshtrain.training.files import METRICS_NAME
from meshtrain.tuning.sweep.choices import Combination

Item = TypeVar("Item")
Found = TypeVar("Found")
MOST_NAMED = 3
"""Runs that a problem names at most."""


@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep.

    Attributes:
        combination: the values that it has.
        config: with a run directory, and a place for checkpoints, of its own.
    """

    combination: Combination
    config: RunConfig

    @property
    def name(self) -> str:
        """Return the name of its run directory."""
        return self.combination.name

    @property
    def directory(self) -> Path:
        """Return its run directory."""
        return Path(self.config.run_directory)

    @property
    def file(self) -> Path:
        """Return its run file, beside the run directory."""
        return self.directory.with_name(f"{self.name}.toml")


def read_runs(run: Path, combinations: Sequence[Combination], directory: Path | None) -> list[SweepRun]:
    """Read a run file with each combination on top.

    Args:
        run: the run file.
        combinations: of the values to try.
        directory: in which the run directories are; None: the `run_directory` of the run file.

    Raises:
        UserError: with every problem, or if the directory holds a run itself.
    """

    def read(combination: Combination) -> SweepRun:
        config = load_run(run, combination.overrides)
        return SweepRun(combination, _placed(config, directory or Path(config.run_directory), combination.name))

    runs = list(_all_or_problems(combinations, read, lambda combination: combination.name))
    above = runs[0].directory.parent
    if (above / METRICS_NAME).exists():
        raise ConfigError(f"{shown_path(above)} holds a run", "pass another --directory for the sweep")
    return runs


def _placed(config: RunConfig, directory: Path, name: str) -> RunConfig:
    changed: dict[str, Any] = {"run_directory": str(absolute_path(str(directory), Path.cwd()) / name)}
    if config.checkpoint.directory is not None:
        # Without the name, all runs would write their checkpoints into one directory.
        own = f"{config.checkpoint.directory.rstrip('/')}/{name}"
        changed["checkpoint"] = config.checkpoint.model_copy(update={"directory": own})
    return config.model_copy(update=changed)


def check_runs(runs: Sequence[SweepRun], remaining: Sequence[SweepRun], world_size: int | None) -> None:
    """Find what `meshtrain check` finds, in all runs.

    Args:
        runs: all. Those that are done must be the same as when they were trained.
        remaining: the runs that are to be trained.
        world_size: number of processes of each run; None: the number that its plan needs.

    Raises:
        UserError: with every problem, and the names of the runs if not all have it.
    """

    def check(run: SweepRun) -> None:
        if run in remaining:
            check_run(run.config, world_size)
        else:
            check_directory(run.config)

    list(_all_or_problems(runs, check, lambda run: run.name))


def _all_or_problems(
    items: Sequence[Item], act: Callable[[Item], Found], name: Callable[[Item], str]
) -> Iterator[Found]:
    """Yield what a function returns for each item.

    Raises:
        UserError: with the problems of all items.
    """
    concerned: dict[Problem, list[str]] = {}
    for item in items:
        try:
            yield act(item)
        except UserError as error:
            for problem in error.problems:
                concerned.setdefault(problem, []).append(name(item))
    if concerned:
        raise UserError(
            problem if len(names) == len(items) else problem.concerning(name_some(names, MOST_NAMED))
            for problem, names in concerned.items()
        )


def write_run_files(runs: Iterable[SweepRun]) -> None:
    """Write the run file of each run.

    Raises:
        ConfigError: if it cannot be written.
    """
    for run in runs:
        try:
            run.file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(run.file, dump_toml(run.config))
        except OSError as error:
            raise ConfigError(
                f"{shown_path(run.file)} cannot be written: {reason_of(error)}", "pass another --directory"
            ) from error
