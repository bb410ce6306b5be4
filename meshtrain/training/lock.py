"""The lock of a run: rank 0 holds it, from before anything is prepared to the end."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from meshtrain.checkpoint.storage.directory import CHECKPOINTS_NAME
from meshtrain.checkpoint.storage.location import Location, shown_location
from meshtrain.config.run import RunConfig
from meshtrain.errors import ConfigError, TrainingStopped
from meshtrain.runtime.agreement import raise_together
from meshtrain.runtime.environment import rank_from_environment
from meshtrain.runtime.lock import Lock, locked
from meshtrain.training.directory import checkpoints_root
from meshtrain.training.hooks import Hook, Metrics, RunState


@dataclass(frozen=True)
class RunLock(Hook):
    """What keeps other runs out of the folders of this one, and stops this one if another run took them over.

    Attributes:
        locks: on rank 0; none elsewhere.
    """

    locks: tuple[Lock, ...]

    def on_step(self, state: RunState, metrics: Metrics) -> None:
        """Stop all ranks if another run has taken over."""
        for problem in filter(None, (lock.loss() for lock in self.locks)):
            state.report_problem(problem)

    def check(self) -> None:
        """Check before a save that the folders are still those of this run. Collective.

        Raises:
            TrainingStopped: the same on all ranks: another run has taken over.
        """
        raise_together(filter(None, (lock.check() for lock in self.locks)), TrainingStopped)


@contextmanager
def locked_run(config: RunConfig) -> Iterator[RunLock]:
    """Hold the run directory and the place of the checkpoints while the block runs.

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
    """Return the folders that a run writes into -> the keys that name them."""
    folders: dict[Location, str] = {Path(config.run_directory).absolute(): "run_directory"}
    root = checkpoints_root(config)
    if isinstance(root, Path):
        # It may be that of another run: then it is the directory of that run that is locked.
        root = root.parent.absolute() if root.name == CHECKPOINTS_NAME else root.absolute()
    folders.setdefault(root, "checkpoint.directory")
    return folders
