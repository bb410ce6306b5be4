"""What `meshtrain learning-rate` does."""

import math
from pathlib import Path

from meshtrain import console
from meshtrain.api.train import train
from meshtrain.config.reading import shown_path
from meshtrain.config.run import RunConfig
from meshtrain.data.cache import write_atomically
from meshtrain.errors import TrainingStopped, UserError, reason_of
from meshtrain.runtime.environment import rank_from_environment
from meshtrain.training.run import Ending
from meshtrain.tuning.rates.page import rates_page, rates_table
from meshtrain.tuning.rates.proposal import propose
from meshtrain.tuning.rates.trial import Bounds, TrialHook, remove_scratch, trial_config


def try_rates(config: RunConfig, bounds: Bounds, html: Path) -> Ending:
    """Train a few steps with growing learning rates, and show which rates they propose.

    Args:
        config: the run whose learning rate is wanted. Its run directory is not touched.
        bounds: the rates to try.
        html: the page to write.

    Returns:
        Why training has ended; `DONE` also if the loss was high enough.

    Raises:
        UserError: if the run cannot be trained, or the page cannot be written.
    """
    hook = TrialHook(bounds)
    console.configure(rank=rank_from_environment())
    console.line(f"Learning rates from {bounds.lowest:.1e} to {bounds.highest:.1e} in {bounds.steps:,} steps")
    try:
        with console.only_progress():
            ending = train(trial_config(config, bounds), [hook])
    finally:
        # Processes that still run write nothing more there.
        if rank_from_environment() == 0:
            remove_scratch(config)
    if ending is not Ending.DONE and not hook.is_enough:
        console.line("Stopped before the loss has risen; nothing is proposed")
        return ending
    if rank_from_environment() == 0:
        _show(hook, Path(config.run_directory).name, html)
    return Ending.DONE


def _show(hook: TrialHook, name: str, html: Path) -> None:
    trial = hook.trial
    if not math.isfinite(trial.losses[0]):
        raise TrainingStopped("the loss of the first step is not finite", "look at the data and the model of the run")
    proposal = propose(trial)
    table = rates_table(trial, proposal)
    console.table(table.title, table.columns, table.rows)
    if hook.is_enough:
        console.line(f"Ended at {trial.rates[-1]:.1e}: the loss was far above its lowest")
    for sentence in proposal.sentences():
        console.line(sentence)
    try:
        write_atomically(html, rates_page(trial, proposal, name))
    except OSError as error:
        raise UserError(f"--html: {html} cannot be written: {reason_of(error)}", "choose another file") from error
    console.line(f"Page: {shown_path(html)}")
