"""What can be found out about a run before any process of it starts."""

from meshtrain.config.run import RunConfig
from meshtrain.inference.run_evaluators import evaluators_of
from meshtrain.planning.machine import check_machine
from meshtrain.training.beginning import check_beginning
from meshtrain.training.directory import check_directory
from meshtrain.training.resolve import ResolvedRun, resolve_run
from meshtrain.training.trackers.packages import check_trackers


def check_run(config: RunConfig, world_size: int | None) -> ResolvedRun:
    """Return a run that is resolved, after all checks that need no process group.

    Args:
        config: of the run.
        world_size: number of processes; None: the number that its plan needs.

    Raises:
        UserError: for a machine, tracker, task or run directory that the run cannot have, and with
            every contradiction of run, plan and model.
    """
    check_machine(config.machine)
    check_trackers(config)
    evaluators_of(config)
    check_directory(config)
    check_beginning(config)
    return resolve_run(config, world_size)
