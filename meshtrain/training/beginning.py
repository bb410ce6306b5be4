"""Check whether a run without a checkpoint may begin at step 0."""

from pathlib import Path

from meshtrain import console
from meshtrain.checkpoint.storage.directory import MANIFEST_NAME, list_checkpoints, step_named, step_of
from meshtrain.checkpoint.storage.location import children, errors_in_one_line, shown_location
from meshtrain.config.reading import shown_path
from meshtrain.config.run import RunConfig
from meshtrain.errors import CheckpointError
from meshtrain.runtime.agreement import failing_together, is_first_rank
from meshtrain.runtime.location import Location
from meshtrain.training.directory import checkpoints_root, metrics_lines
from meshtrain.training.files import METRICS_NAME, SAVED_KEY


def begin_at_step_0(config: RunConfig) -> None:
    """Check that a run without a checkpoint may begin at step 0. Collective.

    If an earlier attempt has left metrics, a line reports that the run starts from the beginning.

    Raises:
        CheckpointError: the same on all processes, see `check_beginning`.
    """
    with failing_together(CheckpointError):
        if is_first_rank() and (last_step := check_beginning(config)):
            path = shown_path(Path(config.run_directory) / METRICS_NAME)
            console.line(
                f"{path} ends with step {last_step:,}, but no checkpoint was saved: the run starts at step 0 again"
            )


def check_beginning(config: RunConfig) -> int:
    """Check that a run that has no checkpoint never saved one.

    A run that was killed before its first save has metrics and no checkpoint too. It may start
    from the beginning, so steps in the metrics decide nothing. What decides is whether the metrics
    record a saved checkpoint.

    Returns:
        The last step in the metrics; 0 if there is none, or if the run has a checkpoint.

    Raises:
        CheckpointError: if a checkpoint was saved and is missing now, or if the location cannot
            be reached.
    """
    root = checkpoints_root(config)
    if list_checkpoints(root):
        return 0
    path = Path(config.run_directory) / METRICS_NAME
    last_step, saved = 0, None
    for _, metrics in metrics_lines(path):
        last_step = max(last_step, metrics["step"])
        if isinstance(metrics.get(SAVED_KEY), str):
            saved = metrics[SAVED_KEY]
    if saved is not None:
        checkpoint = saved if "://" in saved else shown_path(Path(saved))
        raise CheckpointError(
            f"{shown_path(path)} ends with step {last_step:,}, and {checkpoint} was saved, but "
            f"{_what_is_missing(root)}",
            "restore the checkpoint, or set checkpoint.directory to where it is. To start again at step 0, choose "
            f"another run_directory or remove {shown_path(path)}",
        )
    return last_step


def _what_is_missing(root: Location) -> str:
    with errors_in_one_line(root):
        damaged = [folder for folder in children(root) if step_named(folder) is not None]
        if damaged:
            return f"{shown_location(max(damaged, key=step_of))} has no {MANIFEST_NAME}"
        return f"{shown_location(root)} {'holds no checkpoint' if root.exists() else 'does not exist'}"
