"""One stage of a pipeline: a contiguous piece of an unmodified Hugging Face model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.models.adapters import stock_name
from meshtrain.parallel.cut.borders import Place
from meshtrain.parallel.cut.probe import Structure, no_router_logits
from meshtrain.parallel.cut.stubs import Channel


@dataclass(frozen=True)
class Stage:
    """One contiguous piece of the model.

    Attributes:
        index: position of the stage among all stages.
        num_stages: number of stages on the complete pp axis.
        first_layer: index of the first decoder layer of the stage.
        last_layer: index after the last decoder layer of the stage.
        model: the stock model itself if there is one stage. Otherwise the model has stubs for the
            modules of other stages. It is then called with the tensors from the previous stage, and
            with the input ids (batch, seq) by name. It returns logits on the last stage, else the
            tensors for the next stage.
        layers: the list of layers and stubs inside `model`.
        tied: name of a tied parameter (the head's) -> FQN of the original, for each tied parameter
            that this stage holds.
        stages_of_ties: FQN of the original of each tie with copies on several stages -> stage ->
            name of its copy there.
        structure: of the full model; None if there is one stage.
        channel: carries tensors around the stubs in a forward pass.
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
    stages_of_ties: dict[str, dict[int, str]] = field(default_factory=dict)
    structure: Structure | None = None
    channel: Channel = field(default_factory=Channel)
    filled: set[nn.Parameter] = field(default_factory=set)

    @property
    def is_first(self) -> bool:
        """Whether the stage receives nothing from another stage."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage returns logits."""
        return self.index == self.num_stages - 1

    def compute(self, received: Sequence[Tensor], **inputs: Any) -> Any:
        """Run the stage on one microbatch.

        Args:
            received: tensors from the previous stage; none on the first stage.
            inputs: of the model: `input_ids` (batch, seq), masks, positions; with a chunked head,
                also `labels`.

        Returns:
            The logits of the last stage, or the () loss of the labels; else the tensors for the
            next stage.
        """
        if self.num_stages > 1:
            return self.model(*received, **inputs)
        return result_of(self.model(use_cache=False, **no_router_logits(self.model), **inputs))

    def received_like(self, batch: int, length: int) -> list[Tensor]:
        """Return meta tensors of the shapes and formats that the stage receives for a microbatch.

        Args:
            batch: number of sequences.
            length: in tokens.
        """
        return self._like(self._places_received(), batch, length)

    def sent_like(self, batch: int, length: int) -> list[Tensor]:
        """Return meta tensors of the shapes and formats that the stage sends for a microbatch.

        The arguments are those of `received_like`.
        """
        return self._like(self._places_sent(), batch, length)

    def received_follow_sequence(self) -> list[bool]:
        """Return, for each received tensor, whether sequence parallelism splits it."""
        return self._follow_sequence(self._places_received())

    def sent_follow_sequence(self) -> list[bool]:
        """Return, for each tensor that is sent, whether sequence parallelism splits it."""
        return self._follow_sequence(self._places_sent())

    def _follow_sequence(self, places: Sequence[Place]) -> list[bool]:
        assert self.structure is not None, "a model in one piece receives nothing"
        return [bool(place.follows_sequence(self.structure.trace)) for place in places]

    def _places_received(self) -> list[Place]:
        return [value.captured_at for value in self.channel.routes.received]

    def _places_sent(self) -> list[Place]:
        routes = self.channel.routes
        return [it if isinstance(it, Place) else routes.received[it].captured_at for it in routes.sent]

    def _like(self, places: Sequence[Place], batch: int, length: int) -> list[Tensor]:
        assert self.structure is not None, "a model in one piece receives nothing"
        keys = [place.seen_in(self.structure.at(batch, length)).key for place in places]
        # A stage before may be frozen in full, but no stage knows about others.
        return [
            torch.empty(key.shape, dtype=key.dtype, device="meta", requires_grad=key.dtype.is_floating_point)
            for key in keys
        ]

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with their FQNs in the stock model; adapters have peft's names."""
        for name, parameter in self.model.named_parameters(remove_duplicate=remove_duplicate):
            yield stock_name(name), parameter

    def names_of_one_parameter(self) -> dict[str, str]:
        """Return further name -> name, for each tied parameter with several names in this stage."""
        held = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        firsts: dict[str, str] = {source: source for source in self.tied.values() if source in held}
        return {
            name: firsts[source]
            for name, source in self.tied.items()
            if name in held and firsts.setdefault(source, name) != name
        }

    def copies_of_far_originals(self) -> dict[str, str]:
        """Return FQN -> name on this stage, for tied weights whose originals are elsewhere."""
        held = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        further = self.names_of_one_parameter()
        return {s: name for name, s in self.tied.items() if s not in held and name not in further}

    def own_layers(self) -> list[nn.Module]:
        """Return the decoder layers that this stage holds, without the stubs."""
        return list(self.layers)[self.first_layer : self.last_layer]


def result_of(output: Any) -> Tensor:
    """Return the logits of a model, or the loss that its chunked head has computed instead."""
    result: Tensor = output.loss if output.get("logits") is None else output.logits
    return result
