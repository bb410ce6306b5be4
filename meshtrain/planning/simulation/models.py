"""The model of a run on the meta device, built once for all simulations of a process."""

import copy
import functools
import json
from collections.abc import Sequence
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
    return _copy_of(full_model(run), run.layers)


def _copy_of(full: PreTrainedModel, layers: Sequence[int] | None) -> PreTrainedModel:
    if layers is None:
        return copy.deepcopy(full)
    # Layers that do not exist in the run are not copied.
    memo: dict[int, Any] = {id(it): it for index, it in enumerate(find_layers(full)[1]) if index not in layers}
    model = copy.deepcopy(full, memo)
    keep_layers(model, layers)
    return model


def shared_structure(run: SimulatedRun) -> Structure | None:
    """Return the structure of the model of a run; None if each process needs one of its own.

    It must not be changed.

    Raises:
        ModelError: for a model that cannot be cut.
    """
    if len(run.plan.pipeline.layer_counts) == 1:
        return None
    structure, routes = _borders_of(run)
    return None if run.plan.mesh.tp > 1 and may_cut_borders(structure, routes) else structure


def messages_of(run: SimulatedRun) -> list[Message]:
    """Return what the stages of a run send to each other for a microbatch."""
    if len(run.plan.pipeline.layer_counts) == 1:
        return []
    rows, length = run.batch.micro_batch_size, run.batch.sequence_length
    structure = shared_structure(run)
    if structure is None:
        return messages(build_run_model(run), run.plan, rows, length)
    return messages_between(structure, _borders_of(run)[1], run.plan, rows, length)


def _borders_of(run: SimulatedRun) -> tuple[Structure, list[StageRoutes]]:
    fused, compute = json.dumps(run.plan.tensor.fused), run.plan.precision.activations
    return _borders(full_model(run), run.layers, fused, compute, tuple(run.plan.pipeline.layer_counts))


@functools.lru_cache(maxsize=2)
def _borders(
    full: PreTrainedModel, layers: tuple[int, ...] | None, fused: str, compute: str, layer_counts: tuple[int, ...]
) -> tuple[Structure, list[StageRoutes]]:
    model = _copy_of(full, layers)
    unfuse(model, json.loads(fused))
    return find_borders(model, layer_counts, getattr(torch, compute))
