"""Trace one forward pass of a model on the meta device: what its parts pass to each other.

A part of a model is a module that a stage holds completely: a decoder layer, or a module with
parameters before, between or after the layers. Everything else (masks, positions, residuals outside
of the layers) is computed again on every stage, by the model's own code.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.compat.autograd import OperatorMode, all_entries_nonzero, memory_of, tensors_in, times_changed
from meshtrain.models.rotary import probed
from meshtrain.parallel.cut.hooks import hooks_disabled
from meshtrain.parallel.cut.kinds import two_layers_of_each_kind
from meshtrain.parallel.cut.meta import SHAPE_ONLY, KnownLists, result_without_values, states_restored
from meshtrain.parallel.cut.nest import Path, map_nest, tensors_with_paths

OUTPUT = "logits"
"""Stands for the model itself, whose logits the last stage returns."""


class SideChannelError(Exception):
    """A part uses what another stage may hold; the message names the part and the operator."""


@dataclass(frozen=True)
class TensorKey:
    """Identifies a tensor of a trace: its memory, its view of this memory, and its version."""

    memory: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: int


@dataclass(frozen=True)
class Seen:
    """A tensor that a part received or returned.

    Attributes:
        key: equal for two tensors only if they are the same.
        sources: parts (by number of their call) and parameters outside of parts (by name) whose
            results it is computed from.
        is_used: whether the part computed with the values of the tensor.
    """

    key: TensorKey
    sources: frozenset[int | str]
    is_used: bool = True


@dataclass
class Call:
    """One call of a part.

    Attributes:
        name: FQN of the part.
        layer: index of the layer, or None for another part.
        after: index of the last layer that was called before; -1 before the first one.
        inputs: path in (args, kwargs) -> tensor.
        outputs: path in the result -> tensor.
        result: the nest of results, with meta tensors.
        written: entries that the part added to a mapping among its arguments, by path.
    """

    name: str
    layer: int | None
    after: int
    inputs: dict[Path, Seen] = field(default_factory=dict)
    outputs: dict[Path, Seen] = field(default_factory=dict)
    result: Any = None
    written: dict[Path, Seen] = field(default_factory=dict)


@dataclass
class Trace:
    """What the parts of a model passed to each other in one forward pass.

    Attributes:
        calls: in order; the last stands for the logits of the model.
        first_used: parameter outside of parts -> index of the last layer called before its first
            use, and the operator.
        last_used: the same for its last use.
        overwritten: memory of results of parts that the model itself changes in place.
        read: memory of tensors whose values the model or a part uses.
        dropouts: dropout module outside of parts -> index of the last layer called before.
    """

    calls: list[Call] = field(default_factory=list)
    first_used: dict[str, tuple[int, str]] = field(default_factory=dict)
    last_used: dict[str, tuple[int, str]] = field(default_factory=dict)
    overwritten: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    dropouts: dict[str, int] = field(default_factory=dict)


def trace_parts(
    model: PreTrainedModel, layers_name: str, layers: nn.ModuleList, inputs: Mapping[str, Any], *, length: int
) -> Trace:
    """Return the trace of one forward pass.

    Args:
        model: on the meta device; it is not changed.
        layers_name: FQN of the list of its layers.
        layers: this list.
        inputs: of the model, on the meta device.
        length: of the sequences, in tokens.
    """
    tracer = _Tracer(model, layers_name, layers)
    with ExitStack() as stack:
        stack.enter_context(hooks_disabled(model))
        stack.enter_context(_training(model))
        stack.enter_context(states_restored(model))
        stack.enter_context(probed(model, length))
        # A layer that may be dropped draws on the CPU. The masks of the next step must not change.
        stack.enter_context(torch.random.fork_rng(devices=[]))
        # Parts that compute their own gradients run without those of autograd.
        stack.enter_context(torch.enable_grad())
        # Meta tensors do not show the expert of a token: the shapes are those of all tokens going
        # to all experts.
        stack.enter_context(all_entries_nonzero())
        stack.enter_context(tracer.hooks())
        stack.enter_context(two_layers_of_each_kind([*layers], tracer.used, tracer.sources))
        stack.enter_context(KnownLists())
        stack.enter_context(tracer)
        output = model(**inputs)
        tracer.finish(output.logits)
    return tracer.trace


class _Tracer(OperatorMode):
    """Dispatch mode that tracks which parts each tensor is computed from."""

    def __init__(self, model: PreTrainedModel, layers_name: str, layers: nn.ModuleList) -> None:
        super().__init__()
        self.trace = Trace()
        self._model, self._layers_name = model, layers_name
        self._indices = {id(layer): index for index, layer in enumerate(layers)}
        self._around = {*_ancestors(layers_name)}
        # Memory -> calls and parameters that it is computed from.
        self.sources: dict[int, frozenset[int | str]] = {}
        # Memory is identified by its address, so it must not be freed during the trace.
        self._alive: list[Tensor] = []
        self._open: Call | None = None
        # Memory whose values the running part has used.
        self.used: set[int] = set()
        # Memory that the running part may use, and memory -> call in which a part has made it.
        self._own: set[int] = set()
        self._made_in: dict[int, int] = {}
        self._layer = -1
        self._results: dict[int, tuple[Tensor, int]] = {}
        self._parameters: dict[int, str] = {}
        for name, parameter in model.named_parameters():
            if not name.startswith(f"{layers_name}."):
                self._parameters[memory_of(parameter)] = name

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Watch the calls of all modules that may be parts."""
        handles = []
        for name, module in self._model.named_modules():
            is_inside = name.startswith(f"{self._layers_name}.") and id(module) not in self._indices
            if isinstance(module, nn.Dropout) and not is_inside:
                handles.append(module.register_forward_pre_hook(partial(self._note_dropout, name)))
            if name in self._around or is_inside or not any(True for _ in module.parameters()):
                continue
            handles.append(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(self._leave, name), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def finish(self, logits: Tensor) -> None:
        """Record the output of the model, as if it were a part that uses it."""
        call = Call(OUTPUT, None, self._layer)
        call.inputs[()] = self._seen(logits)
        self.trace.read.add(memory_of(logits))
        self.trace.calls.append(call)
        self.trace.overwritten = {
            memory for memory, (tensor, version) in self._results.items() if times_changed(tensor) != version
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known, result = result_without_values(func, args)
        if not known:
            result = func(*args, **kwargs)
        if func.name().partition(".")[0] in SHAPE_ONLY:
            return result
        operands = tensors_in((args, kwargs))
        if self._open is not None:
            self._check_operands(self._open, operands, func.name())
            self.used.update(map(memory_of, operands))
            made = dict.fromkeys(map(memory_of, tensors_in(result)), len(self.trace.calls))
            self._made_in |= {memory: number for memory, number in made.items() if memory not in self._own}
            self._alive += tensors_in(result)
            return result
        self.trace.read.update(memory_of(tensor) for tensor in operands)
        sources = frozenset[int | str]().union(*(self._sources_of(tensor, func.name()) for tensor in operands))
        if sources:
            for tensor in tensors_in(result):
                self._add(tensor, sources)
        return result

    def _check_operands(self, call: Call, operands: list[Tensor], operator: str) -> None:
        """Check that a part uses its inputs, its parameters, and what it has computed itself."""
        for memory in map(memory_of, operands):
            if memory in self._own:
                continue
            if (number := self._made_in.get(memory, len(self.trace.calls))) != len(self.trace.calls):
                other = self.trace.calls[number].name
                raise SideChannelError(f"{call.name} uses a result of {other} in {operator}, but not as an argument")
            if memory in self.sources:
                raise SideChannelError(f"{call.name} uses a tensor in {operator} that is not one of its arguments")
            if memory in self._parameters:
                name = self._parameters[memory]
                raise SideChannelError(f"{call.name} uses {name} in {operator}, which belongs to another module")

    def _sources_of(self, tensor: Tensor, operator: str) -> frozenset[int | str]:
        memory = memory_of(tensor)
        name = self._parameters.get(memory)
        if name is None:
            return self.sources.get(memory, frozenset())
        self.trace.first_used.setdefault(name, (self._layer, operator))
        self.trace.last_used[name] = (self._layer, operator)
        return frozenset({name})

    def _add(self, tensor: Tensor, sources: frozenset[int | str]) -> None:
        memory = memory_of(tensor)
        self.sources[memory] = self.sources.get(memory, frozenset()) | sources
        self._alive.append(tensor)

    def _seen(self, tensor: Tensor, *, is_used: bool = True) -> Seen:
        self._alive.append(tensor)
        key = TensorKey(
            memory_of(tensor),
            int(tensor.storage_offset()),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            times_changed(tensor),
        )
        return Seen(key, self.sources.get(key.memory, frozenset()), is_used)

    def _note_dropout(self, name: str, module: nn.Module, args: Any) -> None:
        if self._open is None:
            self.trace.dropouts[name] = self._layer

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._open is not None:
            return
        index = self._indices.get(id(module))
        if index is not None and not torch.is_grad_enabled():
            raise SideChannelError(f"it calls {name} without autograd, and computes gradients itself")
        self._open = Call(name, index, self._layer)
        self.used.clear()
        inputs = [tensor for _, tensor in tensors_with_paths((args, kwargs))]
        self._own = {memory_of(tensor) for tensor in (*inputs, *module.parameters())}
        self._open.inputs = {path: self._seen(tensor) for path, tensor in tensors_with_paths((args, kwargs))}
        if index is not None:
            self._layer = index

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._open
        if call is None or call.name != name:
            return
        self._open = None
        number = len(self.trace.calls)
        self.trace.calls.append(call)
        own = frozenset({number})
        for path, tensor in tensors_with_paths((args, kwargs)):
            before = call.inputs.get(path)
            if before is None or before.key.memory != memory_of(tensor):
                self.sources[memory_of(tensor)] = own
                call.written[path] = self._seen(tensor)
            elif before.key.version != times_changed(tensor):
                raise SideChannelError(f"{name} changes its input in place")
        call.inputs = {
            path: Seen(seen.key, seen.sources, seen.key.memory in self.used) for path, seen in call.inputs.items()
        }
        self.trace.read.update(seen.key.memory for seen in call.inputs.values() if seen.is_used)
        for path, tensor in tensors_with_paths(output):
            memory = memory_of(tensor)
            if any(seen.key.memory == memory for seen in call.inputs.values()):
                # The part returns its input, or a view of it.
                self.sources[memory] = self.sources.get(memory, frozenset()) | own
            else:
                self.sources[memory] = own
            call.outputs[path] = self._seen(tensor)
            self._results[memory] = tensor, times_changed(tensor)
        call.result = map_nest(lambda path, tensor: tensor, output)


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) + 1)]


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Set the model to training mode, in which dropout returns a new tensor."""
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
