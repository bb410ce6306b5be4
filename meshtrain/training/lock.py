"""Lock of a run: rank 0 holds it from before the data is prepared until the end."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from meshtrain.checkpoint.storage.directory import CHECKPOINTS_NAME
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
        for folder, key in folders.items():
            what, advice = f"{key} = {shown_location(folder)}", f"choose another {key}"
            locks.append(stack.enter_context(locked(folder, what, advice, ConfigError)))
        yield RunLock(tuple(locks))


def _folders(config: RunConfig) -> Mapping[Location, str]:
    """Return folder -> key that names it, for the folders that a run writes into."""
    folders: dict[Location, str] = {Path(config.run_directory).absolute(): "run_directory"}
    root = checkpoints_root(config)
    if isinstance(root, Path):
        # The checkpoints may belong to another run. Then the directory of that run is locked.
        root = root.parent.absolute() if root.name == CHECKPOINTS_NAME else root.absolute()
    folders.setdefault(root, "checkpoint.directory")
    return folders
