"""Checkpoints of a program with its own training loop."""

from pathlib import Path

from meshtrain.api.arguments import check_optimizer, checkpoints_at
from meshtrain.api.handle import handle_of
from meshtrain.api.saving import source_of
from meshtrain.config.arguments import check_flag, whole_number, wrong
from meshtrain.errors import CheckpointError
from meshtrain.models.initialize import restore_buffers
from meshtrain.runtime.location import Location
from meshtrain.training.saving import restore_state, save_state
from meshtrain.training.state import TrainState


def save_checkpoint(directory: str | Path, state: TrainState, *, keep: int = 3) -> Location:
    """Write a checkpoint of `state.step` into `directory`/step-N. Collective.

    The checkpoint is published completely or not at all, and its files are hashed. Every rank
    writes its own shards of parameters and optimizer states, under the names of the stock model, so
    any mesh can load it. It holds the options of the optimizer's groups, such as the learning rate.
    It also holds `state.values`, the configuration of the model, and the tokenizer of the directory
    that the model came from, if there is one. `meshtrain export` turns it into an ordinary model.

    Args:
        directory: a directory that every machine sees, or a URL that fsspec knows.
        state: of a model that `parallelize` returned.
        keep: number of the newest checkpoints that stay; older ones are removed.

    Returns:
        The location of the checkpoint.

    Raises:
        CheckpointError: on all ranks alike. The checkpoint cannot be written, and earlier ones are
            untouched; `directory` has a complete checkpoint of a later step, from which a restart
            would resume; or the state has something that a checkpoint cannot hold.
        ModelError: if the model is not parallel, or has no values.
        TrainingStopped: on all ranks alike: something in the state is not finite.

    Source: torch.distributed.checkpoint, to which hashes and a manifest are added.
    """
    call = "save_checkpoint"
    root = checkpoints_at(f"{call}: directory", directory)
    _check_state(call, state)
    state.step = whole_number(f"{call}: state.step", state.step, CheckpointError, least=0)
    if not isinstance(state.values, dict):
        raise wrong(f"{call}: state.values", state.values, "a dict, such as {'position': 3}", CheckpointError)
    handle = handle_of(state.model)
    handle.check_values()
    return save_state(
        root,
        handle.pipeline,
        state,
        keep=whole_number(f"{call}: keep", keep, CheckpointError),
        origin=source_of(handle),
        forward_passes=handle.num_forwards,
    )


def load_checkpoint(directory: str | Path, state: TrainState, *, missing_ok: bool = False) -> TrainState:
    """Fill `state` in place from a checkpoint that was saved on any mesh, bit for bit. Collective.

    Model and optimizer must be those that were saved; an error lists what is missing or unexpected.
    The optimizer's groups get the options that were saved, and `state.step` and `state.values` are
    restored. Dropout continues as it would have without the restart. A checkpoint of `meshtrain
    train` can be loaded too, with an optimizer of the same class.

    Args:
        directory: a step-N directory, or its parent, whose newest complete checkpoint is taken.
        state: of a model that `parallelize` returned; a model from meta needs no `initialize`
            before.
        missing_ok: leave the state as it is if there is no checkpoint yet, so that a program starts
            and resumes with the same line.

    Returns:
        `state`.

    Raises:
        CheckpointError: on all ranks alike: there is no checkpoint, none is complete, or it is of
            another model or optimizer.
        ModelError: if the model is not parallel.

    Source: torch.distributed.checkpoint, which reads any layout into any other.
    """
    call = "load_checkpoint"
    where = checkpoints_at(f"{call}: directory", directory)
    _check_state(call, state)
    check_flag(f"{call}: missing_ok", missing_ok, CheckpointError)
    handle = handle_of(state.model)
    if not handle.has_values:
        for stage in handle.pipeline.stages:
            restore_buffers(stage.model)
    manifest = restore_state(where, handle.pipeline, state, missing_ok=missing_ok)
    if manifest is not None:
        handle.has_values, handle.num_forwards = True, manifest.forward_passes
    return state


def _check_state(call: str, state: object) -> None:
    if not isinstance(state, TrainState):
        raise wrong(f"{call}: state", state, "a meshtrain.TrainState(model, optimizer, step, values)", CheckpointError)
    if state.optimizer is not None:
        check_optimizer(f"{call}: state.optimizer", state.optimizer, CheckpointError)
