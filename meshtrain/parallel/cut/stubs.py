"""Modules without parameters that replace the modules of other stages.

With them the unmodified forward of a Hugging Face model runs on a stage that holds only a few
layers. Stage 1 of 3:

    carrier -> embedding stub
            -> stub, entry stub, layer 2, layer 3, exit stub, stub
                     |                             |
                     returns the received          keeps the result of the stage, and returns
                     hidden states                 zeros, whose further results are unused
            -> norm stub -> head stub
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Channel:
    """Passes hidden states around the modules before and after the layers of a forward pass.

    Attributes:
        received: hidden states from the previous stage.
        captured: hidden states for the next stage.
        sequence_length: of the full sequence, in tokens; hidden states may be only a part of it.
        writes_in_place: whether the model changes its carrier, which then needs memory of its own.
        logits: of a stage without the head; like those of the last stage, but with an empty
            vocabulary.
    """

    received: Tensor | None = None
    captured: Tensor | None = None
    sequence_length: int = 0
    writes_in_place: bool = False
    logits: Tensor | None = None

    def blank(self, shape: Sequence[int]) -> Tensor:
        """Return zeros of a shape, whose values are not used.

        They take memory only if the model writes into them.
        """
        assert self.received is not None, "a stage ran without input"
        return self._zeros(self.received, shape)

    def capture(self, hidden_states: Tensor) -> Tensor:
        """Keep the hidden states for the next stage, and return zeros for the full sequence.

        The hidden states may be only a part of the sequence.
        """
        self.captured = hidden_states
        batch, _, hidden = hidden_states.shape
        return self._zeros(hidden_states, (batch, self.sequence_length, hidden))

    def _zeros(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        return like.new_zeros(shape) if self.writes_in_place else like.new_zeros(()).expand(shape)


class LayerStub(nn.Module):
    """Replaces a decoder layer of another stage, at the index of the layer.

    Plain attributes of the layer stay readable, since a model may ask a layer for its type. The
    children of the layer also stay readable, on the meta device: Falcon-H1 initializes a buffer
    inside each layer by a rule of the complete model.
    """

    def __init__(self, layer: nn.Module, *, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple
        # This avoids torch's registration, because a stub must not have parameters.
        self.__dict__["parts"] = layer.parts if isinstance(layer, LayerStub) else dict(layer.named_children())
        for name, value in vars(layer).items():
            if (
                not name.startswith("_")
                and name != "training"
                and isinstance(value, (str, int, float, bool, type(None)))
            ):
                setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        parts = self.__dict__.get("parts", {})
        return parts[name] if name in parts else super().__getattr__(name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        hidden_states = self.transform(hidden_states)
        return (hidden_states,) if self.as_tuple else hidden_states

    def transform(self, hidden_states: Tensor) -> Tensor:
        """Return the input of the next layer; here it is unchanged."""
        return hidden_states


class EntryStub(LayerStub):
    """The stub before the first layer of a later stage; it returns the received hidden states."""

    def __init__(self, layer: nn.Module, channel: Channel, *, as_tuple: bool) -> None:
        super().__init__(layer, as_tuple=as_tuple)
        self.channel = channel

    def transform(self, hidden_states: Tensor) -> Tensor:
        """Return the received hidden states, and ignore those computed from the carrier."""
        assert self.channel.received is not None, "a stage ran without input"
        return self.channel.received


class ExitStub(LayerStub):
    """The stub after the last layer of an earlier stage; it keeps the hidden states."""

    def __init__(self, layer: nn.Module, channel: Channel, *, as_tuple: bool) -> None:
        super().__init__(layer, as_tuple=as_tuple)
        self.channel = channel

    def transform(self, hidden_states: Tensor) -> Tensor:
        """Keep the hidden states, and return zeros for the modules after the layers."""
        return self.channel.capture(hidden_states)


class PassStub(nn.Module):
    """Replaces a norm, a dropout or a projection; it returns its input."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


class CaptureStub(nn.Module):
    """Replaces the first module after the layers on a stage with the last layer but no head.

    It keeps the hidden states for the next stage.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self.channel = channel

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.channel.capture(hidden_states)


class BlankStub(nn.Module):
    """Replaces a module before the layers (embedding, norm, projection).

    It returns zeros in the shape of the result of that module.

    Args:
        channel: has the length of the sequence, and the batch size in the received hidden states.
        probed: shape of the result for one sequence of `probe_length` tokens.
        probe_length: in tokens.
    """

    def __init__(self, channel: Channel, probed: Sequence[int], probe_length: int) -> None:
        super().__init__()
        self.channel = channel
        self.has_batch = tuple(probed[:2]) == (1, probe_length)
        self.has_sequence = not self.has_batch and tuple(probed[:1]) == (probe_length,)
        self.rest = tuple(probed[2 if self.has_batch else 1 if self.has_sequence else 0 :])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        assert self.channel.received is not None, "a stage ran without input"
        sequence = self.channel.sequence_length
        if self.has_batch:
            return self.channel.blank((self.channel.received.shape[0], sequence, *self.rest))
        return self.channel.blank((sequence, *self.rest) if self.has_sequence else self.rest)


class HeadStub(nn.Module):
    """Replaces the head; it returns logits with an empty vocabulary."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    @property
    def weight(self) -> Tensor:
        """An empty weight, because some models read its dtype."""
        return torch.empty(0, dtype=self.dtype)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states[..., :0]
