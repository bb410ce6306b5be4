"""Lock of a run: rank 0 holds it from before the data is prepared until the end."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from meshtrain.checkpoint.storage.location import shown_location
from meshtrain.config.run import RunConfig
from meshtrain.errors import ConfigError, TrainingStopped
from meshtrain.runtime.agreement import raise_together
from meshtrain.runtime.environment import rank_from_environment
from meshtrain.runtime.location import Location
from meshtrain.runtime.lock import Lock, locked
from meshtrain.training.directory import checkpoints_root
from meshtrain.training.hooks import Hook, Metrics, RunState


@dataclass(frozen=True)
class RunLock(Hook):
    """Keeps other runs out of the folders of this run, and stops this run if one took them over.

    Attributes:
        locks: the locks on rank 0; empty on other ranks.
    """

    locks: tuple[Lock, ...]

    def on_step(self, state: RunState, metrics: Metrics) -> None:
        """Stop all ranks if another run has taken over the folders."""
        for problem in filter(None, (lock.loss() for lock in self.locks)):
            state.report_problem(problem)

    def check(self) -> None:
        """Check before a save that the folders still belong to this run. Collective.

        Raises:
            TrainingStopped: the same on all ranks: another run has taken over the folders.
        """
        raise_together(filter(None, (lock.check() for lock in self.locks)), TrainingStopped)


@contextmanager
def locked_run(config: RunConfig) -> Iterator[RunLock]:
    """Hold the run directory and the location of the checkpoints while the block runs.

    Raises:
        ConfigError: if another run holds one of them.
    """
    with ExitStack() as stack:
        folders = _folders(config) if rank_from_environment() == 0 else {}
        locks = []
        for folder, (key, what) in folders.items():
            locks.append(stack.enter_context(locked(folder, what, f"choose another {key}", ConfigError)))
        yield RunLock(tuple(locks))


def _folders(config: RunConfig) -> Mapping[Location, tuple[str, str]]:
    """Return folder -> (key, key with its value), for the folders that a run writes into.

    The folder of the checkpoints has a lock of its own, because another run or a program may write
    its checkpoints there too.
    """
    named = {"run_directory": Path(config.run_directory), "checkpoint.directory": checkpoints_root(config)}
    folders: dict[Location, tuple[str, str]] = {}
    for key, folder in named.items():
        # Two paths to one folder, such as a link and its target, must not be locked twice.
        resolved = folder.resolve() if isinstance(folder, Path) else folder
        folders.setdefault(resolved, (key, f"{key} = {shown_location(folder)}"))
    return folders
