"""What is predicted for a run. It is simulated once, and kept in the cache."""

import json
from dataclasses import fields, is_dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from pydantic import BaseModel
from transformers import PretrainedConfig

from meshtrain import console
from meshtrain.data.cache import Cache, compute_identity
from meshtrain.models.own_code import own_code
from meshtrain.pictures.timeline import Timeline
from meshtrain.planning.machine import Machine
from meshtrain.planning.needs import find_needs, simulated_run
from meshtrain.planning.simulation.rank import NotSimulated
from meshtrain.planning.speed.step_time import StepTime
from meshtrain.planning.verdict import verdict
from meshtrain.profiling.files import AxisTraffic, Prediction, prediction_path, read_prediction
from meshtrain.runtime.environment import rank_from_environment
from meshtrain.training.resolve import ResolvedRun

REASON_NAME = "not-simulated.txt"
"""File with the reason why a step cannot be simulated, in place of its prediction."""


def read_or_predict(resolved: ResolvedRun, machine: Machine) -> Prediction | str:
    """Return the prediction of a run, or why there is none: its model cannot be simulated.

    All processes of a run call this at once: one of them works and the others wait for it. Another
    start, or another run whose prediction must be the same, reads what it has found.

    Raises:
        DataError: if the cache cannot be written.
    """
    cache = Cache(Path(resolved.config.data.cache_directory), leads=rank_from_environment() == 0)
    name = f"predictions/{_key(resolved, machine)}"
    cache.build(name, partial(_fill, resolved, machine))
    prediction = read_prediction(cache.directory / name)
    return (cache.directory / name / REASON_NAME).read_text() if prediction is None else prediction


def predict(resolved: ResolvedRun, machine: Machine) -> Prediction:
    """Simulate a run, and return what is predicted for it.

    Raises:
        NotSimulated: for a class with an operator that needs values.
    """
    needs = find_needs(resolved, machine)
    found = verdict(needs, machine)
    time, world_size = needs.time, resolved.plan.mesh.world_size
    return Prediction(
        machine=machine.shown_name,
        measured=machine.has_measured_rates(world_size),
        is_cpu=machine.is_cpu,
        world_size=world_size,
        limit_bytes=machine.memory_bytes,
        peak_bytes=needs.peaks_of_pp_ranks(),
        fits=found.fits,
        verdict=f"{found.sentence} {found.besides}".rstrip(),
        step_seconds=None if time is None else time.seconds,
        tokens_per_second=None if time is None else time.tokens_per_second,
        mfu=None if time is None else time.mfu,
        peak_tflops=None if time is None else time.peak_tflops,
        bubble=None if time is None else time.replay.bubble,
        axes={} if time is None else _traffic(time),
        timeline=Timeline(()) if time is None else time.replay.timeline,
    )


def _traffic(time: StepTime) -> dict[str, AxisTraffic]:
    return {
        axis: AxisTraffic(found.num_bytes, found.seconds, found.exposed_seconds)
        for axis, found in time.replay.axes.items()
    }


def _fill(resolved: ResolvedRun, machine: Machine, directory: Path) -> None:
    console.line(f"Simulating a step on {machine.shown_name}, to predict its memory and its time")
    try:
        prediction = predict(resolved, machine)
    except NotSimulated as error:
        # Training needs no prediction. The advice of the error is for `meshtrain plan --gpu`.
        (directory / REASON_NAME).write_text(error.problems[0].found)
    else:
        prediction_path(directory).write_text(json.dumps(prediction.to_json()))


def _key(resolved: ResolvedRun, machine: Machine) -> str:
    """Return a hash of everything that decides what is predicted."""
    run = simulated_run(resolved, on_gpus=not machine.is_cpu, granularity=machine.granularity)
    return compute_identity(
        [version(library) for library in ("torch", "transformers", "meshtrain")],
        own_code(type(resolved.model)),
        _for_json(run),
        _for_json(machine),
    )


def _for_json(value: object) -> object:
    """Return a value as JSON can hold it, with all fields of a dataclass and all settings."""
    if isinstance(value, PretrainedConfig):
        return value.to_json_string()
    if isinstance(value, BaseModel):
        return json.dumps(value.model_dump(mode="json"), sort_keys=True)
    if is_dataclass(value):
        return {field.name: _for_json(getattr(value, field.name)) for field in fields(value)}
    return value
