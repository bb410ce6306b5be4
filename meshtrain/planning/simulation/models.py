"""The model of a run on the meta device, built once for all simulations of a process."""

import copy
import functools
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from meshtrain.models.build import build_meta_model
from meshtrain.models.dtypes import DTYPES
from meshtrain.models.fused import unfuse
from meshtrain.parallel.account import Message, messages, messages_between
from meshtrain.parallel.cut.borders import StageRoutes
from meshtrain.parallel.cut.probe import Structure, find_layers
from meshtrain.parallel.cut.stage import find_borders
from meshtrain.parallel.tensor.local_shapes import may_cut_borders
from meshtrain.planning.simulation.fewer_layers import keep_layers
from meshtrain.planning.simulation.run import SimulatedRun


class _Same:
    """A key of a cache that is equal for the same object only."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def full_model(run: SimulatedRun) -> PreTrainedModel:
    """Return the model of a run with all of its layers. It must not be changed."""
    return _built(_Same(run.hf_config), run.attention, run.trust_remote_code, run.plan.precision.parameters)


@functools.lru_cache(maxsize=1)
def _built(config: _Same, attention: str, trust_remote_code: bool, dtype: str) -> PreTrainedModel:
    own: PretrainedConfig = copy.deepcopy(config.value)
    return build_meta_model(own, dtype=DTYPES[dtype], attention=attention, trust_remote_code=trust_remote_code)


def build_run_model(run: SimulatedRun) -> PreTrainedModel:
    """Return a copy of the model of a run, with the layers that exist in the run."""
    full = full_model(run)
    if run.layers is None:
        return copy.deepcopy(full)
    kept = {*run.layers}
    # Layers that do not exist in the run are not copied.
    memo: dict[int, Any] = {id(it): it for index, it in enumerate(find_layers(full)[1]) if index not in kept}
    model = copy.deepcopy(full, memo)
    keep_layers(model, run.layers)
    return model


def shared_structure(run: SimulatedRun) -> Structure | None:
    """Return the structure of the model of a run; None if each process needs one of its own.

    It must not be changed.

    Raises:
        ModelError: for a model that cannot be cut.
    """
    if len(layers_of_stages(run)) == 1:
        return None
    structure, routes = _borders(_Traced(run), layers_of_stages(run))
    return None if run.plan.mesh.tp > 1 and may_cut_borders(structure, routes) else structure


def messages_of(run: SimulatedRun) -> list[Message]:
    """Return what the stages of a run send to each other for a microbatch."""
    if len(layers_of_stages(run)) == 1:
        return []
    rows, length = run.batch.micro_batch_size, run.batch.sequence_length
    structure = shared_structure(run)
    if structure is None:
        return messages(build_run_model(run), run.plan, rows, length)
    _, routes = _borders(_Traced(run), layers_of_stages(run))
    return messages_between(structure, routes, run.plan, rows, length)


def layers_of_stages(run: SimulatedRun) -> tuple[int, ...]:
    """Return the number of layers of each stage."""
    layers = run.plan.pipeline.layers_per_stage
    assert isinstance(layers, list), "the plan is not resolved"
    return tuple(layers)


class _Traced:
    """A run as a key of a cache: it is equal to those whose models have the same structure."""

    def __init__(self, run: SimulatedRun) -> None:
        self.run = run
        self._key = _Same(full_model(run)), run.layers, repr(run.plan.tensor.fused), run.plan.precision.compute

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Traced) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@functools.lru_cache(maxsize=2)
def _borders(traced: _Traced, layers_per_stage: tuple[int, ...]) -> tuple[Structure, list[StageRoutes]]:
    model = build_run_model(traced.run)
    unfuse(model, traced.run.plan.tensor.fused)
    return find_borders(model, layers_per_stage, getattr(torch, traced.run.plan.precision.compute))
