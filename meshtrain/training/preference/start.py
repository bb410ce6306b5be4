"""The start of a run: its parameters get their values, and its data what a reference says."""

from dataclasses import replace

from meshtrain.checkpoint.manifest import SavedReference
from meshtrain.checkpoint.storage.location import shown_location
from meshtrain.errors import CheckpointError
from meshtrain.training.build import Run
from meshtrain.training.preference.reference import (
    Reference,
    compute_reference,
    model_of_reference,
    name_of_reference,
    read_reference,
    with_reference,
)
from meshtrain.training.run_checkpoints import Found, give_first_values, set_values


def start_run(run: Run, found: Found | None) -> Run:
    """Return a run whose parameters have values, and whose data have their reference. Collective.

    Args:
        found: the checkpoint to resume from; None: the run begins.

    Raises:
        CheckpointError: if the reference of a resumed run is gone, and so is its model; or if it
            had none.
    """
    if not run.config.preference.has_reference:
        set_values(run, found)
        return run
    if found is None:
        set_values(run, None)
        saved = _named(run)
        reference = read_reference(run, saved.name)
        if reference is None:
            reference = compute_reference(run, saved.name)
    else:
        saved, reference = _of_resumed(run, found)
        set_values(run, found)
    return replace(run, dataset=with_reference(run.dataset, reference), reference=saved)


def _named(run: Run) -> SavedReference:
    model = model_of_reference(run)
    return SavedReference(model=model, name=name_of_reference(run, model))


def _of_resumed(run: Run, found: Found) -> tuple[SavedReference, Reference]:
    checkpoint, manifest = found
    saved = manifest.reference
    if saved is None:
        raise CheckpointError(
            f"{shown_location(checkpoint)}: it was saved without a reference, which preference.loss = "
            f'"{run.config.preference.loss}" needs',
            "go on with the loss of that run, or begin a new run from its weights in a directory of its own",
        )
    reference = read_reference(run, saved.name)
    if reference is None:
        give_first_values(run)
        if model_of_reference(run) != saved.model:
            raise CheckpointError(
                f"{shown_location(checkpoint)}: the log-probabilities of its reference are not in "
                f"{run.config.data.cache_directory} any more, and the weights or the configuration in "
                f"{run.config.model.path} are others than those at the start",
                "put back the model that was there then",
            )
        reference = compute_reference(run, saved.name)
    return saved, reference
