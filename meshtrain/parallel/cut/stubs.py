"""Parameter-free modules that stand where a stage does not own the real one.

They let the unmodified forward of a Hugging Face model run on a stage that holds a few of its layers. Stage 1 of 3:

    carrier -> embedding stub -> stub, entry stub, layer 2, layer 3, exit stub, stub -> norm stub -> head stub
                                       |                             |
                        gives what was received         keeps the result; what the others make of it is thrown away
"""

from collections.abc import Sequence
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
        writes_in_place: whether the model changes its carrier, which then needs memory of its own.
        logits: of a stage without the head: those of the last stage, but over no vocabulary.
    """

    received: Tensor | None = None
    captured: Tensor | None = None
    sequence_length: int = 0
    writes_in_place: bool = False
    logits: Tensor | None = None

    def blank(self, shape: Sequence[int]) -> Tensor:
        """Return zeros of a shape, to be thrown away; they take memory only where the model writes into them."""
        assert self.received is not None, "a stage ran without input"
        return self._zeros(self.received, shape)

    def capture(self, hidden_states: Tensor) -> Tensor:
        """Keep the stream for the stage after, and return zeros: the stream may be a part of the sequence only."""
        self.captured = hidden_states
        batch, _, hidden = hidden_states.shape
        return self._zeros(hidden_states, (batch, self.sequence_length, hidden))

    def _zeros(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        return like.new_zeros(shape) if self.writes_in_place else like.new_zeros(()).expand(shape)


class LayerStub(nn.Module):
    """Stands for a decoder layer of another stage, at its own index.

    Plain attributes of the layer stay readable, since a model may ask a layer for its type, and so do its parts, on
    meta: Falcon-H1 initialises a buffer inside of every layer by a rule of the whole model.
    """

    def __init__(self, layer: nn.Module, *, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple
        # Past torch's registration: a stub has no parameters.
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
        """Keep the stream, and let the postamble make what it likes of zeros."""
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


class BlankStub(nn.Module):
    """Stands for a module before the layers (embedding, norm, projection): gives zeros in the shape of its result.

    Args:
        channel: says how long the sequence is.
        probed: shape of the result for one sequence of `probe_length` tokens.
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
