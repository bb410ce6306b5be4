"""Cut an unmodified Hugging Face model into pipeline stages.

The forward pass of the model is not changed. Stubs without parameters replace the modules of other
stages, under the same names. So FQNs, layer indices, masks and positions on every stage are those
of the stock model.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.compat.autograd import memory_of
from meshtrain.compat.nn import set_forward
from meshtrain.models.adapters import stock_name
from meshtrain.models.probe_inputs import PROBE_LENGTH, probe_ids, probe_mask
from meshtrain.models.rotary import probed
from meshtrain.parallel.cut.hooks import copy_with_hooks, hooks_disabled
from meshtrain.parallel.cut.probe import (
    MISFITS,
    ModelStructure,
    cannot_be_cut,
    find_layers,
    no_router_logits,
    probe_structure,
)
from meshtrain.parallel.cut.stubs import (
    BlankStub,
    CaptureStub,
    Channel,
    EntryStub,
    ExitStub,
    HeadStub,
    LayerStub,
    PassStub,
)


@dataclass(frozen=True)
class Stage:
    """One contiguous piece of the model.

    Attributes:
        index: position of the stage among all stages.
        num_stages: number of stages on the complete pp axis.
        first_layer: index of the first decoder layer of the stage.
        last_layer: index after the last decoder layer of the stage.
        model: the stock model itself if there is one stage. Otherwise the model has stubs for the
            modules of other stages. It is then called with input ids (batch, seq) on the first
            stage, else with a hidden state (batch, seq, hidden). It returns logits on the last
            stage, else a hidden state.
        layers: the list of layers and stubs inside `model`.
        tied: name of a tied parameter (the head's) -> FQN of the original, for each tied parameter
            that this stage holds.
        channel: has the hidden state that the stage received, and the length of the sequence.
        filled: parameters with zero gradients in this step, because no sample of this process gave
            them a gradient.
    """

    index: int
    num_stages: int
    first_layer: int
    last_layer: int
    model: PreTrainedModel
    layers: nn.ModuleList
    tied: dict[str, str]
    channel: Channel
    filled: set[nn.Parameter] = field(default_factory=set)

    @property
    def is_first(self) -> bool:
        """Whether the stage takes input ids."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage returns logits."""
        return self.index == self.num_stages - 1

    def compute(self, received: Tensor, **inputs: Any) -> Tensor:
        """Run the stage on one microbatch.

        Args:
            received: input ids (batch, seq) for the first stage, else the hidden state (batch, seq,
                hidden).
            inputs: other inputs of the model: masks, positions.

        Returns:
            The logits of the last stage, else the hidden state.
        """
        if self.num_stages > 1:
            return self.model(received, **inputs)
        return self.model(input_ids=received, use_cache=False, **no_router_logits(self.model), **inputs).logits

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with their FQNs in the stock model; adapters have peft's names."""
        for name, parameter in self.model.named_parameters(remove_duplicate=remove_duplicate):
            yield stock_name(name), parameter

    def own_layers(self) -> list[nn.Module]:
        """Return the decoder layers that this stage holds, without the stubs."""
        return list(self.layers)[self.first_layer : self.last_layer]


def cut(model: PreTrainedModel, layers_per_stage: Sequence[int], indices: Sequence[int]) -> list[Stage]:
    """Return the stages with the given indices.

    Args:
        model: on the meta device. It cannot be used afterward.
        layers_per_stage: number of decoder layers of every stage, in order; the last may be 0 (only
            the head).
        indices: of the stages that this process holds, ascending.

    Raises:
        ModelError: for a class whose layers do not pass one hidden state to each other.
    """
    num_stages = len(layers_per_stage)
    if num_stages == 1:
        _, layers = find_layers(model)
        return [Stage(0, 1, 0, len(layers), model, layers, dict(model.all_tied_weights_keys), Channel())]
    structure = probe_structure(model)
    return [_cut_one(copy_with_hooks(model), structure, layers_per_stage, index) for index in indices]


def check_cut(model: PreTrainedModel) -> None:
    """Check on meta that the first, two middle and the last stage run, each without decoder layers.

    Args:
        model: on the meta device; it is not changed.

    Raises:
        ModelError: for a class whose forward does not run with the stubs in it.
    """
    structure = probe_structure(model)
    _, layers = find_layers(model)
    below = structure.num_layers - 1
    received = None
    try:
        for layers_per_stage, index in (
            ([0, below + 1], 0),
            ([1, 0, below], 1),
            ([1, below, 0], 1),
            ([below + 1, 0], 1),
        ):
            # Stubs replace the layers in the copy: a large model has thousands of modules in them.
            stubs: dict[int, Any] = {
                id(layer): LayerStub(layer, as_tuple=structure.layers_return_tuples) for layer in layers
            }
            with hooks_disabled(model):
                copied = copy.deepcopy(model, stubs)
            stage = _cut_one(copied, structure, layers_per_stage, index)
            received = _run_probe(stage, structure, received)
    except MISFITS as error:
        raise cannot_be_cut(model, f"a stage of it does not run ({type(error).__name__}: {error})") from error


def _run_probe(stage: Stage, structure: ModelStructure, received: Tensor | None) -> Tensor:
    # Some models read the dtype of any parameter, and this stage may have none of the real ones.
    stage.layers.register_parameter("any", nn.Parameter(torch.empty(0, device="meta")))
    stage.channel.sequence_length = PROBE_LENGTH
    first = probe_ids(torch.device("meta")) if received is None else received
    with probed(stage.model, PROBE_LENGTH):
        output = stage.model.eval()(first, **probe_mask(torch.device("meta"), with_mask=structure.takes_ready_mask))
    if received is not None and not stage.is_last and not _covers(output, received):
        raise ValueError("it does not pass on the output of its layers")
    return output


def _covers(view: Tensor, tensor: Tensor) -> bool:
    """Return whether `view` is `tensor`, or a slice that covers the full `tensor`."""
    layouts = [(memory_of(it), it.shape, it.stride(), it.storage_offset(), it.dtype) for it in (view, tensor)]
    return layouts[0] == layouts[1]


def _cut_one(model: PreTrainedModel, structure: ModelStructure, layers_per_stage: Sequence[int], index: int) -> Stage:
    first = sum(layers_per_stage[:index])
    last = first + layers_per_stage[index]
    layers = model.get_submodule(structure.layers)
    assert isinstance(layers, nn.ModuleList)
    # `padding_idx` is read before the embedding becomes a stub. The copy of the weight in the head
    # needs it, because its padding row is zeroed as well.
    tied = dict(model.all_tied_weights_keys)
    padding = {source: getattr(_owner(model, source), "padding_idx", None) for source in tied.values()}
    stage = Stage(
        index,
        len(layers_per_stage),
        first,
        last,
        model,
        layers,
        tied,
        Channel(writes_in_place=structure.writes_in_place),
    )
    _stub_layers(stage, structure)
    if not stage.is_first:
        _stub_before(stage, structure)
    if not stage.is_last:
        _stub_after(stage, structure)
    _keep_own_ties(stage, padding)
    _replace_forward(stage)
    return stage


def _stub_layers(stage: Stage, structure: ModelStructure) -> None:
    as_tuple = structure.layers_return_tuples
    for position, layer in enumerate(list(stage.layers)):
        if stage.first_layer <= position < stage.last_layer:
            continue
        if position == stage.first_layer - 1 and not stage.is_first:
            stub: LayerStub = EntryStub(layer, stage.channel, as_tuple=as_tuple)
        elif position == stage.last_layer and not stage.is_last:
            stub = ExitStub(layer, stage.channel, as_tuple=as_tuple)
        else:
            stub = LayerStub(layer, as_tuple=as_tuple)
        stage.layers[position] = stub


def _stub_before(stage: Stage, structure: ModelStructure) -> None:
    for name, shape in structure.before.items():
        module = stage.model.get_submodule(name)
        if isinstance(module, nn.Dropout):
            stage.model.set_submodule(name, PassStub())
        elif any(True for _ in module.parameters()):
            if shape is None:
                raise cannot_be_cut(stage.model, f"its {name} returns something else than one tensor")
            stage.model.set_submodule(name, BlankStub(stage.channel, shape, PROBE_LENGTH))


def _stub_after(stage: Stage, structure: ModelStructure) -> None:
    model = stage.model
    head = model.get_output_embeddings()
    for name in structure.after:
        module = model.get_submodule(name)
        if module is head:
            model.set_submodule(name, HeadStub(next(module.parameters()).dtype))
        elif any(True for _ in module.parameters()):
            model.set_submodule(name, PassStub())
    if stage.last_layer == structure.num_layers:
        model.set_submodule(structure.after[0], CaptureStub(stage.channel))


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
    """Set a forward of the instance from tensor to tensor, which calls the forward of its class."""
    hf_forward = type(stage.model).forward
    channel = stage.channel
    fixed = {"use_cache": False, **no_router_logits(stage.model)}

    def from_ids(self: PreTrainedModel, input_ids: Tensor, **kwargs: Any) -> Tensor:
        return _result(hf_forward(self, input_ids=input_ids, **{**fixed, **kwargs}))

    def from_hidden(self: PreTrainedModel, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        channel.received = hidden_states
        batch, _, hidden = hidden_states.shape
        # Masks, positions and rotary tables are made from the shape of the carrier, which takes no
        # memory. The hidden states themselves may be only a part of the sequence.
        carrier = channel.blank((batch, channel.sequence_length, hidden))
        return _result(hf_forward(self, inputs_embeds=carrier, **{**fixed, **kwargs}))

    def _result(output: Any) -> Tensor:
        channel.received = None
        if stage.is_last:
            return output.logits
        captured, channel.captured = channel.captured, None
        channel.logits = output.logits
        assert captured is not None, "a stage ended without a result"
        return captured

    set_forward(stage.model, MethodType(from_ids if stage.is_first else from_hidden, stage.model))
