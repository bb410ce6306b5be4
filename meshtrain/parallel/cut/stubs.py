"""Stubs that replace the parts of other stages, and what surrounds the parts of a stage.

With them the unmodified forward of a Hugging Face model runs on a stage that holds only some parts.
Stage 1 of 3:

    stub of the embedding -> stub of layer 0, stub of layer 1, layer 2, layer 3, stub of layer 4
                                                               |                 |
                                     gets the received tensors in the place      ends the pass: what
                                     of those computed from stubs                it gets is sent
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.compat.autograd import is_view, memory_of, times_changed
from meshtrain.compat.nn import mix_in, parameter_table
from meshtrain.parallel.cut.borders import Place, StageRoutes
from meshtrain.parallel.cut.nest import map_nest, tensors_with_paths, with_tensor
from meshtrain.parallel.cut.trace import Trace


class StageEndsError(BaseException):
    """Ends the forward pass of a stage, which has computed all that it sends."""


@dataclass
class Channel:
    """Passes tensors around the parts of other stages, during a forward pass of one stage.

    Attributes:
        routes: what the stage receives and sends.
        trace: of the full model, for a batch of the present shape.
        received: from the previous stage, in the order of the routes.
        captured: tensors for the next stage.
        position: number of the next call.
        device: of the pass.
        arrive: changes each received tensor before its use, with its index.
        zeros: number format and device -> a zero, which the stubs of all passes return expanded.
    """

    routes: StageRoutes = field(default_factory=StageRoutes)
    trace: Trace = field(default_factory=Trace)
    received: tuple[Tensor, ...] = ()
    captured: dict[Place, Tensor] = field(default_factory=dict)
    position: int = 0
    device: torch.device | None = None
    arrive: Callable[[int, Tensor], Tensor] = lambda _, x: x
    zeros: dict[tuple[torch.dtype, torch.device | None], Tensor] = field(default_factory=dict)

    def begin(self, trace: Trace, received: Sequence[Tensor], device: torch.device) -> None:
        """Begin a forward pass."""
        self.received = tuple(self.arrive(index, tensor) for index, tensor in enumerate(received))
        self.trace, self.device = trace, device
        self.captured, self.position = {}, 0

    def end(self) -> None:
        """Let go of the tensors of a forward pass."""
        self.received, self.captured = (), {}

    def enter(self, name: str) -> int:
        """Return the number of a call that begins.

        Raises:
            RuntimeError: if the model calls its parts in another order than in the trace.
        """
        number = self.position
        expected = self.trace.calls[number].name
        if name != expected:
            raise RuntimeError(f"the forward pass calls {name} where it called {expected} when the model was cut")
        self.position += 1
        return number

    def place_inputs(self, number: int, nest: Any) -> Any:
        """Return the arguments of a part of this stage, with received tensors in their places."""
        for place, index in self._placed(number, "input"):
            nest = with_tensor(nest, place.path, self.received[index])
        return nest

    def blank_result(self, number: int, nest: Any) -> Any:
        """Return the result of a part of another stage: received tensors, and zeros for the rest.

        Args:
            number: of the call.
            nest: arguments of the part. Mappings among them get what the part wrote into them.
        """
        result = map_nest(lambda path, tensor: self._zeros(tensor), self.trace.calls[number].result)
        for place, index in self._placed(number, "output"):
            result = with_tensor(result, place.path, self.received[index])
        for place, index in self._placed(number, "written"):
            with_tensor(nest, place.path, self.received[index])
        return result

    def capture(self, number: int, side: str, nest: Any) -> None:
        """Take the tensors of a nest that are sent to the next stage."""
        wanted = {
            it.path: it for it in self.routes.sent if isinstance(it, Place) and (it.call, it.side) == (number, side)
        }
        if wanted:
            self.captured.update((wanted[path], tensor) for path, tensor in tensors_with_paths(nest) if path in wanted)

    def leave(self, number: int) -> None:
        """End the pass if nothing of this stage is left to compute."""
        if number == self.routes.ends_at:
            raise StageEndsError

    def sent(self) -> tuple[Tensor, ...]:
        """Return the tensors for the next stage: own results, and received ones to pass on."""
        return tuple(
            _sendable(self.captured[it], is_own=True)
            if isinstance(it, Place)
            else _sendable(self.received[it], is_own=False)
            for it in self.routes.sent
        )

    def _placed(self, number: int, side: str) -> list[tuple[Place, int]]:
        return [
            (place, index) for place, index in self.routes.placed.items() if (place.call, place.side) == (number, side)
        ]

    def _zeros(self, like: Tensor) -> Tensor:
        """Return zeros, which take memory only if the model writes into them."""
        if not like.shape or memory_of(like) in self.trace.overwritten:
            return torch.zeros(like.shape, dtype=like.dtype, device=self.device)
        key = like.dtype, self.device
        # The trace shows where the model writes in training, and an evaluation may write elsewhere.
        if key not in self.zeros or times_changed(self.zeros[key]):
            # A tensor of inference mode could not be used in training.
            with torch.inference_mode(mode=False):
                self.zeros[key] = torch.zeros((), dtype=like.dtype, device=self.device)
        return self.zeros[key].expand(like.shape)


def _sendable(tensor: Tensor, *, is_own: bool) -> Tensor:
    # Schedules that split the backward pass detach what a stage sends, in place, which is an error
    # for a view. What a stage only passes on is a leaf of its graph.
    if not tensor.is_contiguous() or (tensor.is_floating_point() and (is_view(tensor) or not is_own)):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


class PartStub(nn.Module):
    """Replaces a part of another stage, under the same name.

    Its attributes, children and methods stay usable: a model may ask a layer for its type, and
    Falcon-H1 initializes a buffer inside each layer by a rule of the complete model. Parameters are
    zeros without memory, and no initialization rule applies to them.
    """

    _is_hf_initialized = True

    def __init__(self, part: nn.Module, name: str, channel: Channel) -> None:
        super().__init__()
        # This avoids torch's registration, because a stub must not have parameters.
        self.__dict__["part"] = part
        self.__dict__["part_name"] = name
        self.channel = channel

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            part = self.__dict__["part"]
            if name not in parameter_table(part) and not inspect.ismethod(getattr(part, name)):
                return getattr(part, name)
            return getattr(_blank(part, self.channel.device), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        channel = self.channel
        number = channel.enter(self.part_name)
        channel.capture(number, "input", (args, kwargs))
        result = channel.blank_result(number, (args, kwargs))
        channel.leave(number)
        return result


class LacksParameters:
    """Mixin for a module around the layers, of which another stage holds some parameters.

    They read as zeros without memory.
    """

    lacking: dict[str, Tensor]
    channel: Channel

    def __getattr__(self, name: str) -> Any:
        if name in self.lacking:
            return _zeros_like(self.lacking[name], self.channel.device)
        return super().__getattr__(name)  # type: ignore[misc]


def leave_out(owner: nn.Module, kind: str, channel: Channel) -> None:
    """Remove a parameter that another stage holds from its module, in place."""
    lacking = owner.lacking if isinstance(owner, LacksParameters) else {}
    lacking[kind] = parameter_table(owner).pop(kind)
    if not isinstance(owner, LacksParameters):
        mix_in(owner, LacksParameters, lacking=lacking, channel=channel)


def _zeros_like(tensor: Tensor, device: torch.device | None) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


def _blank(part: nn.Module, device: torch.device | None) -> nn.Module:
    """Return a copy of a part whose parameters are zeros without memory."""
    blank = copy.deepcopy(part)
    for module in blank.modules():
        table = parameter_table(module)
        for kind, parameter in table.items():
            if parameter is not None:
                table[kind] = nn.Parameter(_zeros_like(parameter, device), requires_grad=False)
    return blank


class OwnPart:
    """Mixin for a part of this stage: it gets what other stages sent, and gives what they need.

    It surrounds the whole call, so that the recomputation of a layer does not run it again.
    """

    part_name: str
    channel: Channel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        channel = self.channel
        number = channel.enter(self.part_name)
        args, kwargs = channel.place_inputs(number, (args, kwargs))
        channel.capture(number, "input", (args, kwargs))
        result = super().__call__(*args, **kwargs)  # type: ignore[misc]
        channel.capture(number, "output", result)
        channel.capture(number, "written", (args, kwargs))
        channel.leave(number)
        return result


def watch_part(part: nn.Module, name: str, channel: Channel) -> None:
    """Make a part of this stage use the channel, in place."""
    mix_in(part, OwnPart)
    # They are not in the class, which all layers share, so that one compiled graph fits all.
    vars(part).update(part_name=name, channel=channel)
