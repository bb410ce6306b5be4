"""Built-in hooks: they write the metrics of every run, and print its events."""

from collections.abc import Mapping
from pathlib import Path

from meshtrain import console
from meshtrain.checkpoint.storage.location import shown_location
from meshtrain.config.reading import shown_path
from meshtrain.console import TrainingProgress
from meshtrain.training.files import METRICS_NAME, SAVED_KEY
from meshtrain.training.history import name_samples
from meshtrain.training.hooks import NOTHING, Hook, Metrics, RunState
from meshtrain.training.metrics import MetricsWriter


class MetricsHook(Hook):
    """Writes metrics.jsonl and TensorBoard's events, and shows a progress bar or lines."""

    def __init__(self) -> None:
        self._writer: MetricsWriter | None = None

    def on_start(self, state: RunState, metrics: Metrics) -> None:
        """Open the files, and drop what was written about later steps."""
        self._close()
        self._writer = MetricsWriter(
            Path(state.config.run_directory),
            first_step=state.step,
            progress=TrainingProgress(state.num_steps, every=state.config.logging.every),
            tensorboard="tensorboard" in state.config.logging.trackers,
        )
        self._writer.__enter__()
        self._write(state, state.step, metrics)

    def on_step(self, state: RunState, metrics: Metrics) -> None:
        """Write the step, and the averages of its epoch if the epoch is over."""
        self._write(state, state.step, metrics)
        if state.epoch_ends and self._writer is not None:
            self._writer.write_epoch(state.step)
            self._report(state)

    def on_evaluation(self, state: RunState, metrics: Metrics) -> None:
        """Write the evaluation."""
        self._write(state, state.step, metrics)

    def on_scores(self, state: RunState, metrics: Metrics) -> None:
        """Write the scores, or the texts."""
        self._write(state, state.step, metrics)

    def on_checkpoint(self, state: RunState, metrics: Metrics) -> None:
        """Write how long the save took and, once the checkpoint is complete, where it is stored.

        `beginning.check_beginning` reads the location.
        """
        saved = state.saved
        if saved is None:
            self._write(state, state.step, metrics)
        else:
            self._write(state, saved.step, metrics, {SAVED_KEY: str(saved.directory)})

    def on_end(self, state: RunState, metrics: Metrics) -> None:
        """Close the files, and remove the progress bar."""
        self._close()

    def _write(self, state: RunState, step: int, metrics: Metrics, texts: Mapping[str, str] = NOTHING) -> None:
        if self._writer is None:
            return
        if metrics:
            self._writer.write(step, metrics, texts)
        if state.note:
            self._writer.write_note(step, state.note)
        self._report(state)

    def _report(self, state: RunState) -> None:
        # Only the first rank writes, and the others have to stop with it.
        if self._writer is not None and self._writer.problem is not None:
            state.report_problem(
                f"{self._writer.problem}, so training stopped",
                "free disk space, then start the run again; it resumes from its newest checkpoint",
            )

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.__exit__()
            self._writer = None


class LinesHook(Hook):
    """Prints a line for each event that is not a number: bad steps, checkpoints, the end."""

    def on_step(self, state: RunState, metrics: Metrics) -> None:
        """Print the samples of a step that was skipped."""
        if note := state.note:
            console.line(
                f"Step {note['bad_step']:,} is bad, and skipped: {note['fault']}. Samples: "
                f"{name_samples(note['samples'])}. Skipped so far: {note['times']:,}"
            )

    def on_checkpoint(self, state: RunState, metrics: Metrics) -> None:
        """Print where the checkpoint is stored, once it is complete."""
        if state.saved is not None:
            console.line(f"Saved {shown_location(state.saved.directory)}")

    def on_end(self, state: RunState, metrics: Metrics) -> None:
        """Print the result, or how to continue."""
        if state.failure is not None:
            return
        if state.stopped_by is not None:
            done = f"{state.step:,} of {state.num_steps:,} steps are done"
            rest = "the same command resumes from there" if state.config.checkpoint.keep else "no checkpoint was saved"
            console.line(f"Stopped by {state.stopped_by}: {done}; {rest}")
            return
        if "eval_loss" in metrics:
            console.line(
                f"Validation loss {metrics['eval_loss']:.3f} nats per token; the unigram entropy of the text is "
                f"{state.unigram_entropy:.3f}, the loss of a model that knows only token frequencies"
            )
        console.line(f"Done. Metrics: {shown_path(Path(state.config.run_directory) / METRICS_NAME)}")
