"""The model of a run on the meta device, built once for all simulations of a process."""

import copy
import functools
import json
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from meshtrain.models.build import build_meta_model
from meshtrain.models.copying import copy_module
from meshtrain.models.dtypes import DTYPES
from meshtrain.models.fused import unfuse
from meshtrain.models.lora import make_adapters
from meshtrain.parallel.account import Message, messages, messages_between
from meshtrain.parallel.cut.borders import StageRoutes
from meshtrain.parallel.cut.cutter import find_structure, routes_of
from meshtrain.parallel.cut.kinds import kinds_of
from meshtrain.parallel.cut.probe import Structure, find_layers
from meshtrain.parallel.tensor.local_shapes import may_cut_borders
from meshtrain.planning.simulation.fewer_layers import keep_layers
from meshtrain.planning.simulation.run import SimulatedRun
from meshtrain.training.parameter_groups import freeze

# Those of a few numbers of layers, which the plans of a search have.
MOST_STRUCTURES = 16


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
    formats = run.plan.precision.parameters
    return _built(_Same(run.hf_config), run.attention, run.trust_remote_code, formats, _Same(run.optimizer))


@functools.lru_cache(maxsize=1)
def _built(config: _Same, attention: str, trust_remote_code: bool, dtype: str, optimizer: _Same) -> PreTrainedModel:
    own: PretrainedConfig = copy.deepcopy(config.value)
    model = build_meta_model(own, dtype=DTYPES[dtype], attention=attention, trust_remote_code=trust_remote_code)
    freeze(model, optimizer.value)
    return model


@functools.lru_cache(maxsize=1)
def layer_kinds(full: PreTrainedModel) -> tuple[Hashable, ...]:
    """Return for each layer of a full model a value that is equal for those that do the same."""
    layers = find_layers(full)[1]
    types = getattr(full.config.get_text_config(), "layer_types", None) or ()
    parameters = layer_parameters(full)
    return tuple(
        (kind, *types[index : index + 1], own)
        for index, (kind, own) in enumerate(zip(kinds_of([*layers]), parameters, strict=True))
    )


@functools.lru_cache(maxsize=1)
def layer_parameters(full: PreTrainedModel) -> tuple[Hashable, ...]:
    """Return for each layer of a full model a value that is equal for like parameters."""
    return tuple(
        tuple((name, it.shape, it.dtype, it.requires_grad) for name, it in layer.named_parameters())
        for layer in find_layers(full)[1]
    )


def build_run_model(run: SimulatedRun) -> PreTrainedModel:
    """Return a copy of the model of a run, with layers like those that exist in the run."""
    copied: PreTrainedModel = copy_module(_with_layers(full_model(run), run.layers), {})
    return copied


def run_adapters(run: SimulatedRun, model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the LoRA layers of a run, taken off its model, which is frozen then."""
    return {} if run.lora.rank is None else make_adapters(model, run.lora)


def _with_layers(full: PreTrainedModel, layers: tuple[int, ...] | None) -> PreTrainedModel:
    """Return a model with layers like some of a full one; None: all. It must not be changed."""
    return full if layers is None else _shortened(full, _first_alike(layer_kinds(full), layers))


@functools.lru_cache(maxsize=MOST_STRUCTURES)
def _shortened(full: PreTrainedModel, layers: tuple[int, ...]) -> PreTrainedModel:
    # Layers that do not exist in the run are not copied.
    memo: dict[int, Any] = {id(it): it for index, it in enumerate(find_layers(full)[1]) if index not in layers}
    copied: PreTrainedModel = copy_module(full, memo)
    keep_layers(copied, layers)
    return copied


def shared_structure(run: SimulatedRun) -> Structure | None:
    """Return the structure of the model of a run; None if each process needs one of its own.

    It must not be changed.

    Raises:
        ModelError: for a model that cannot be cut.
    """
    if len(run.plan.pipeline.layer_counts) == 1:
        return None
    structure, routes = borders_of(run)
    return None if run.plan.mesh.tp > 1 and may_cut_borders(structure, routes) else structure


def messages_of(run: SimulatedRun) -> list[Message]:
    """Return what the stages of a run send to each other for a microbatch."""
    if len(run.plan.pipeline.layer_counts) == 1:
        return []
    rows, length = run.batch.micro_batch_size, run.batch.sequence_length
    structure = shared_structure(run)
    if structure is None:
        return messages(build_run_model(run), run.plan, rows, length)
    return messages_between(structure, borders_of(run)[1], run.plan, rows, length)


def borders_of(run: SimulatedRun) -> tuple[Structure, list[StageRoutes]]:
    """Return the structure of the model of a run, and the routes of its stages.

    The structure must not be changed.

    Raises:
        ModelError: for a model that cannot be cut.
    """
    model = _with_layers(full_model(run), run.layers)
    structure = _structure(model, json.dumps(run.plan.tensor.fused), run.plan.precision.activations)
    return structure, routes_of(structure, run.plan.pipeline.layer_counts)


def _first_alike(kinds: Sequence[Hashable], layers: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first layers of a model that compute the same as some of its layers, in order.

    So the structures of many stages are one.
    """
    indices: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        indices.setdefault(kind, []).append(index)
    number = Counter[Hashable]()
    found = []
    for layer in layers:
        kind = kinds[layer]
        found.append(indices[kind][number[kind]])
        number[kind] += 1
    return tuple(found) if found == sorted(found) else layers


@functools.lru_cache(maxsize=MOST_STRUCTURES)
def _structure(model: PreTrainedModel, fused: str, compute: str) -> Structure:
    unfused = copy_module(model, {})
    unfuse(unfused, json.loads(fused))
    return find_structure(unfused, getattr(torch, compute))
