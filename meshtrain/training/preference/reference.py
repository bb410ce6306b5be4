"""The reference: log-probabilities of all answers by the model that a run starts from.

They are computed once, on the mesh of the run, before any parameter changes. A file of the cache
keeps them, so neither a resumption nor another run from the same weights computes them again.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from meshtrain import console
from meshtrain.compat.transformers import PATH_KEY
from meshtrain.config.mesh import DATA_AXES, PP
from meshtrain.data.cache import Cache, compute_identity
from meshtrain.data.samples.dataset import Dataset
from meshtrain.data.samples.loader import build_loader
from meshtrain.data.samples.order import FILLER, SampleOrder
from meshtrain.data.samples.referenced import ReferencedSamples
from meshtrain.data.samples.rows import Samples
from meshtrain.errors import DataError
from meshtrain.runtime.agreement import failing_together, is_first_rank
from meshtrain.runtime.mesh import all_reduce_over, data_rank
from meshtrain.training.build import Run
from meshtrain.training.loop import data_share, on_device
from meshtrain.training.preference.loss import PreferenceLoss
from meshtrain.training.self_check import stock_checksum

TRAIN, VALIDATION = "train", "validation"
FILE_NAME = "log_probabilities.npz"
_NOT_OF_THE_MODEL = {PATH_KEY, "architectures", "transformers_version"}
Reference = Mapping[str, np.ndarray]
"""Part of the data -> (samples, 2) float64 log-probabilities, as `ReferencedSamples` has them."""


def model_of_reference(run: Run) -> str:
    """Return a hash of the model that a run has now, the same on every mesh. Collective.

    It is that of the weights, without adapters, which change nothing at the start, and of the
    configuration, without where it came from.
    """
    config = run.identity.resolved.hf_config.to_dict()
    kept = {key: value for key, value in config.items() if key not in _NOT_OF_THE_MODEL}
    return compute_identity(stock_checksum(run.pipeline), json.dumps(kept, sort_keys=True, default=str))


def name_of_reference(run: Run, model: str) -> str:
    """Return the name of the file for a model, the data, and the number formats."""
    return compute_identity(model, run.identity.data.identity, run.identity.plan.precision.model_dump())


def read_reference(run: Run, name: str) -> Reference | None:
    """Return the reference that the cache keeps under a name; None if it has none. Collective.

    The first process reads it.
    """
    found: list[Reference | None] = [_read(_directory(run, name)) if is_first_rank() else None]
    torch.distributed.broadcast_object_list(found)
    return found[0]


def compute_reference(run: Run, name: str) -> Reference:
    """Compute the reference with the parameters that a run has now, and keep it. Collective.

    Raises:
        DataError: on all processes, if the cache cannot be written.
    """
    parts = _parts(run.dataset)
    console.line(f"Computing the log-probabilities of {sum(map(len, parts.values())):,} samples by the initial model")
    grown = run.pipeline.rotary_length.grown()
    found = {part: _log_probs(run, samples, f"reference, {part}") for part, samples in parts.items()}
    run.pipeline.rotary_length.restore(grown)
    with failing_together(DataError):
        if is_first_rank():
            Cache(_directory(run, name).parent).build(name, lambda directory: _write(directory, found))
    return found


def with_reference(dataset: Dataset, reference: Reference) -> Dataset:
    """Return a dataset whose samples have the reference."""
    samples = {part: ReferencedSamples(own, reference[part]) for part, own in _parts(dataset).items()}
    validation: dict[str, tuple[Samples, SampleOrder]] = {
        name: (samples[_part(name)], order) for name, (_, order) in dataset.validation.items()
    }
    return Dataset(samples[TRAIN], dataset.order, validation, dataset.streams)


def _parts(dataset: Dataset) -> dict[str, Samples]:
    return {TRAIN: dataset.samples, **{_part(name): samples for name, (samples, _) in dataset.validation.items()}}


def _part(source: str) -> str:
    return f"{VALIDATION}/{source}"


def _directory(run: Run, name: str) -> Path:
    return Path(run.config.data.cache_directory) / "references" / name


def _write(directory: Path, reference: Reference) -> None:
    np.savez(directory / FILE_NAME, **reference)  # type: ignore[arg-type]


def _read(directory: Path) -> Reference | None:
    path = directory / FILE_NAME
    if not path.is_file():
        return None
    try:
        # The format has a checksum of each array.
        with np.load(path) as file:
            return {part: file[part] for part in file.files}
    except (BadZipFile, EOFError, ValueError) as error:
        console.line(f"{path} is damaged ({error}), and is computed again")
        shutil.rmtree(directory)
        return None


def _log_probs(run: Run, samples: Samples, description: str) -> np.ndarray:
    loss = run.context.loss
    assert isinstance(loss, PreferenceLoss), "the run trains on judged answers"
    order = SampleOrder(len(samples), global_batch_size=run.config.global_batch_size, shuffle=False, drop_last=False)
    found = np.zeros((len(samples), 2))
    batches = build_loader(samples, order, start_step=0, stop_step=order.steps_per_epoch, **data_share(run))
    with console.progress(description, order.steps_per_epoch) as advance:
        for batch in batches:
            own = loss.both_rows(run.pipeline, on_device(run, batch))
            is_sample = batch.sample_ids != FILLER
            found[batch.sample_ids[is_sample]] = _of_all(run, own).cpu().numpy()[is_sample]
            advance(1)
    return found


def _of_all(run: Run, own: Tensor) -> Tensor:
    """Return (global_batch, 2) of all processes from (local_batch, 2) of the last stage of each."""
    mesh = run.pipeline.mesh
    every = own.new_zeros(run.config.global_batch_size, 2)
    if run.pipeline.has_last_stage:
        first = data_rank(mesh) * len(own)
        every[first : first + len(own)] = own
    return all_reduce_over(every, mesh, (*DATA_AXES, PP))
