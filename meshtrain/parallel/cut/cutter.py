"""Cut an unmodified Hugging Face model into pipeline stages.

The forward pass of the model is not changed. Stubs without parameters replace the modules of other
stages, under the same names. So FQNs, layer indices, masks and positions on every stage are those
of the stock model.
"""

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.compat.autograd import all_entries_nonzero
from meshtrain.compat.nn import set_forward
from meshtrain.models.probe_inputs import PROBE_LENGTH
from meshtrain.models.rotary import probed
from meshtrain.parallel.cut.borders import NotCuttableError, StageRoutes, Stages, find_routes
from meshtrain.parallel.cut.hooks import copy_with_hooks, hooks_disabled
from meshtrain.parallel.cut.kinds import two_layers_of_each_kind
from meshtrain.parallel.cut.meta import KnownLists, WithoutValues
from meshtrain.parallel.cut.probe import (
    MISFITS,
    Structure,
    cannot_be_cut,
    find_layers,
    meta_inputs,
    no_router_logits,
    probe,
    probe_structure,
)
from meshtrain.parallel.cut.stage import Stage, result_of
from meshtrain.parallel.cut.stubs import Channel, PartStub, StageEndsError, leave_out, watch_part


def cut(
    model: PreTrainedModel,
    layers_per_stage: Sequence[int],
    indices: Sequence[int],
    compute: torch.dtype | None = None,
    structure: Structure | None = None,
) -> list[Stage]:
    """Return the stages with the given indices.

    Args:
        model: on the meta device. It cannot be used afterward.
        layers_per_stage: number of decoder layers of every stage, in order; the last may be 0 (only
            the head).
        indices: of the stages that this process holds, ascending.
        compute: number format in which the model computes; None: that of its parameters.
        structure: of the model, if it is known.

    Raises:
        ModelError: for a class whose parts cannot be divided among stages.
    """
    num_stages = len(layers_per_stage)
    if num_stages == 1:
        _, layers = find_layers(model)
        return [Stage(0, 1, 0, len(layers), model, layers, dict(model.all_tied_weights_keys))]
    structure = structure or probe(_traceable(model, compute))
    routes = routes_of(structure, layers_per_stage)
    return [
        _cut_one(_copy_for(model, layers_per_stage, index), structure, routes[index], layers_per_stage, index)
        for index in indices
    ]


def check_cut(model: PreTrainedModel, layers_per_stage: Sequence[int]) -> None:
    """Check on meta that every stage runs, and passes on what the next one needs.

    Args:
        model: on the meta device; it is not changed.
        layers_per_stage: as for `cut`.

    Raises:
        ModelError: for a class whose forward does not run with the stubs in it.
    """
    structure = probe_structure(model)
    routes = routes_of(structure, layers_per_stage)
    received: Any = ()
    try:
        for index in range(len(layers_per_stage)):
            with hooks_disabled(model):
                copied = _copy_for(model, layers_per_stage, index)
            stage = _cut_one(copied, structure, routes[index], layers_per_stage, index)
            received = run_probe(stage, received)
    except MISFITS as error:
        raise cannot_be_cut(model, f"a stage of it does not run ({type(error).__name__}: {error})") from error


def _copy_for(model: PreTrainedModel, layers_per_stage: Sequence[int], index: int) -> PreTrainedModel:
    """Return a copy of a model in which the layers of other stages are those of the model.

    They become stubs. Copies of them would take longest.
    """
    _, layers = find_layers(model)
    first = sum(layers_per_stage[:index])
    return copy_with_hooks(model, [*layers[:first], *layers[first + layers_per_stage[index] :]])


def run_probe(stage: Stage, received: Sequence[Tensor]) -> Any:
    """Run a stage on meta, and return what it sends."""
    structure = stage.structure
    assert structure is not None
    # Some models read the dtype of any parameter, and this stage may have none of the real ones.
    stage.layers.register_parameter("any", nn.Parameter(torch.empty(0, device="meta")))
    inputs = meta_inputs(1, PROBE_LENGTH, structure.options)
    with (
        structure.options.default_device(),
        torch.random.fork_rng(devices=[]),
        probed(stage.model, PROBE_LENGTH),
        all_entries_nonzero(),
        torch.no_grad(),
        two_layers_of_each_kind(stage.own_layers(), set(), ()),
        KnownLists(),
        WithoutValues(),
    ):
        output = stage.model.train()(*received, **inputs)
    if not stage.is_last:
        for sent, like in zip(output, stage.sent_like(1, PROBE_LENGTH), strict=True):
            if (sent.shape, sent.dtype) != (like.shape, like.dtype):
                raise ValueError(f"it sends {tuple(sent.shape)} instead of {tuple(like.shape)}")
    return output


def _traceable(model: PreTrainedModel, compute: torch.dtype | None) -> PreTrainedModel:
    """Return a copy of a model on the meta device, in the number format that it computes in."""
    copied = copy_with_hooks(model)
    nn.Module.to(copied, "meta")
    for parameter in copied.parameters():
        if compute is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(compute)
    return copied


def find_borders(
    model: PreTrainedModel, layers_per_stage: Sequence[int], compute: torch.dtype | None = None
) -> tuple[Structure, list[StageRoutes]]:
    """Return the structure of a model, and what each stage receives and sends.

    Args:
        model: the stock model; it is not changed.
        layers_per_stage: as for `cut`.
        compute: as for `cut`.

    Raises:
        ModelError: for a class whose parts cannot be divided among stages.
    """
    structure = find_structure(model, compute)
    return structure, routes_of(structure, layers_per_stage)


def find_structure(model: PreTrainedModel, compute: torch.dtype | None = None) -> Structure:
    """Return the structure of a model. The arguments and errors are those of `find_borders`."""
    return probe(_traceable(model, compute))


def routes_of(structure: Structure, layers_per_stage: Sequence[int]) -> list[StageRoutes]:
    """Return what each stage receives and sends.

    Args:
        structure: of the model; it is not changed.
        layers_per_stage: as for `cut`.

    Raises:
        ModelError: for a class whose parts cannot be divided among stages.
    """
    try:
        return find_routes(structure.trace, Stages(structure.trace, layers_per_stage, structure.layers_name))
    except NotCuttableError as error:
        raise cannot_be_cut(structure.model, str(error)) from error


def _cut_one(
    model: PreTrainedModel, structure: Structure, routes: StageRoutes, layers_per_stage: Sequence[int], index: int
) -> Stage:
    first = sum(layers_per_stage[:index])
    layers = model.get_submodule(structure.layers_name)
    assert isinstance(layers, nn.ModuleList)
    # `padding_idx` is read before the embedding becomes a stub. The copy of the weight in the head
    # needs it, because its padding row is zeroed as well.
    tied = dict(model.all_tied_weights_keys)
    padding = {source: getattr(_owner(model, source), "padding_idx", None) for source in tied.values()}
    stages = Stages(structure.trace, layers_per_stage, structure.layers_name)
    stage = Stage(
        index,
        len(layers_per_stage),
        first,
        first + layers_per_stage[index],
        model,
        layers,
        tied,
        _stages_of_ties(tied, stages),
        structure,
        Channel(routes),
    )
    _replace_parts(stage, stages)
    _keep_own_ties(stage, padding)
    _replace_forward(stage)
    return stage


def _stages_of_ties(tied: Mapping[str, str], stages: Stages) -> dict[str, dict[int, str]]:
    names: dict[str, dict[int, str]] = {}
    for copied, source in tied.items():
        for name in (source, copied):
            names.setdefault(source, {}).setdefault(stages.of_parameter(name), name)
    return {source: copies for source, copies in sorted(names.items()) if len(copies) > 1}


def _replace_parts(stage: Stage, stages: Stages) -> None:
    model, structure = stage.model, stage.structure
    assert structure is not None
    for name, owners in stages.of_parts().items():
        part = model.get_submodule(name)
        if len(owners) > 1:
            raise cannot_be_cut(model, f"it calls {name} on {len(owners)} stages, with one set of parameters")
        if stage.index in owners:
            watch_part(part, name, stage.channel)
        else:
            model.set_submodule(name, PartStub(part, name, stage.channel))
    for position, layer in enumerate(list(stage.layers)):
        # The model may skip a layer (the cross-attention of Mllama), which then is no part.
        if not stage.first_layer <= position < stage.last_layer and not isinstance(layer, PartStub):
            stage.layers[position] = PartStub(layer, f"{structure.layers_name}.{position}", stage.channel)
    for name, layer_before in structure.trace.dropouts.items():
        if stages.after_layer(layer_before) != stage.index:
            # It would draw masks for zeros.
            model.get_submodule(name).p = 0.0  # type: ignore[assignment]
    held_by_parts = tuple(f"{name}." for name in (*stages.of_parts(), structure.layers_name))
    for name, _ in list(model.named_parameters(remove_duplicate=False)):
        if not name.startswith(held_by_parts) and stage.index != stages.of_parameter(name):
            leave_out(_owner(model, name), name.rpartition(".")[2], stage.channel)


def _keep_own_ties(stage: Stage, padding: dict[str, int | None]) -> None:
    # Duplicates are kept, because both ends of a tie inside one stage count.
    held = {name for name, _ in stage.model.named_parameters(remove_duplicate=False)}
    for copy_name, source in list(stage.tied.items()):
        if copy_name not in held:
            del stage.tied[copy_name]
        elif padding[source] is not None:
            _owner(stage.model, copy_name).padding_idx = padding[source]  # type: ignore[assignment]


def _owner(model: nn.Module, parameter_name: str) -> nn.Module:
    return model.get_submodule(parameter_name.rpartition(".")[0])


def _replace_forward(stage: Stage) -> None:
    """Set a forward of the instance that calls the forward of its class around the stubs."""
    channel, structure = stage.channel, stage.structure
    assert structure is not None
    fixed = {"use_cache": False, **no_router_logits(stage.model)}

    def forward(
        self: PreTrainedModel, *received: Tensor, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if stage.is_last and labels is not None:
            kwargs["labels"] = labels
        # torch's schedules pass the tokens to the first stage by position too.
        arrived = () if stage.is_first else received
        channel.begin(structure.at(*input_ids.shape), arrived, input_ids.device)
        try:
            # A chunked head may have changed that of the class.
            output = type(self).forward(self, input_ids=input_ids, **{**fixed, **kwargs})
        except StageEndsError:
            return channel.sent()
        finally:
            channel.end()
        assert stage.is_last, "a stage ended without a result"
        return result_of(output)

    set_forward(stage.model, MethodType(forward, stage.model))
