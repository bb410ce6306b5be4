"""Parameter-free modules that stand where a stage does not own the real one.

They let the unmodified forward of a Hugging Face model run on a stage that holds a few of its layers. Stage 1 of 3:

    carrier -> embedding stub -> stub, entry stub, layer 2, layer 3, exit stub, stub -> norm stub -> head stub
                                       |                             |
                        gives what was received         keeps the result; what the others make of it is thrown away
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Channel:
    """Hands the hidden state past the preamble and the postamble of a forward pass.

    Attributes:
        received: what the stage before sent.
        captured: what goes to the stage after.
        sequence_length: of the whole sequence, in tokens; the stream may hold only a part of it.
    """

    received: Tensor | None = None
    captured: Tensor | None = None
    sequence_length: int = 0

    def carrier(self, like: Tensor) -> Tensor:
        """Return a tensor of zeros that takes no memory, with the shape that a stream has that is not split.

        Args:
            like: (batch, any length, hidden), of the same type and device.
        """
        batch, _, hidden = like.shape
        return like.new_zeros(()).expand(batch, self.sequence_length, hidden)

    def capture(self, hidden_states: Tensor) -> Tensor:
        """Keep the stream for the stage after, and return a carrier: the stream may be a part of the sequence only."""
        self.captured = hidden_states
        return self.carrier(hidden_states)


class LayerStub(nn.Module):
    """Stands for a decoder layer of another stage, at its own index.

    Plain attributes of the layer stay readable, since a model may ask a layer for its type.
    """

    def __init__(self, layer: nn.Module, *, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple
        for name, value in vars(layer).items():
            if (
                not name.startswith("_")
                and name != "training"
                and isinstance(value, (str, int, float, bool, type(None)))
            ):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        hidden_states = self.transform(hidden_states)
        return (hidden_states,) if self.as_tuple else hidden_states

    def transform(self, hidden_states: Tensor) -> Tensor:
        """Return what the next layer gets: here, what came."""
        return hidden_states


class EntryStub(LayerStub):
    """The stub before the first layer of a later stage: gives the stream that the stage before sent."""

    def __init__(self, layer: nn.Module, channel: Channel, *, as_tuple: bool) -> None:
        super().__init__(layer, as_tuple=as_tuple)
        self.channel = channel

    def transform(self, hidden_states: Tensor) -> Tensor:
        """Throw away what the preamble made of the carrier."""
        assert self.channel.received is not None, "a stage ran without input"
        return self.channel.received


class ExitStub(LayerStub):
    """The stub after the last layer of an earlier stage: keeps the stream for the stage after."""

    def __init__(self, layer: nn.Module, channel: Channel, *, as_tuple: bool) -> None:
        super().__init__(layer, as_tuple=as_tuple)
        self.channel = channel

    def transform(self, hidden_states: Tensor) -> Tensor:
        """Keep the stream, and let the postamble make what it likes of a carrier."""
        return self.channel.capture(hidden_states)


class PassStub(nn.Module):
    """Stands for a norm, a dropout or a projection."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


class CaptureStub(nn.Module):
    """Stands for the first module after the layers, where a stage ends with the very last layer but has no head."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self.channel = channel

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.channel.capture(hidden_states)


class ZeroStub(nn.Module):
    """Stands for an embedding whose result is added to the stream."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros((), device=x.device)


class HeadStub(nn.Module):
    """Stands for the head: logits over no vocabulary."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    @property
    def weight(self) -> Tensor:
        """An empty weight: some models ask it for its dtype."""
        return torch.empty(0, dtype=self.dtype)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states[..., :0]
