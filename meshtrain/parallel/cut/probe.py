"""Find the decoder layers of an unmodified Hugging Face model, and the modules around them.

Nothing here knows a model family. A forward pass on the meta device shows what the model calls
before, between and after the layers, and what these pass to each other.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.errors import ModelError
from meshtrain.models.probe_inputs import PROBE_LENGTH
from meshtrain.parallel.cut.trace import OUTPUT, SideChannelError, Trace, trace_parts

# Errors of a forward pass when a model is built in another way than a probe expects.
MISFITS = (TypeError, ValueError, AttributeError, RuntimeError, IndexError, KeyError, AssertionError)


def find_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the name and the ModuleList of the decoder layers.

    It is the outermost list of the configured length, and the one with most parameters if there are
    several. Without a list of that length, it is the one with most parameters.

    Raises:
        ModelError: if the model has no list of modules with parameters.
    """
    config = model.config.get_text_config()
    # A decoder of an encoder-decoder configuration has both numbers.
    expected = getattr(config, "decoder_layers", getattr(config, "num_hidden_layers", None))
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters())
    ]
    candidates = [(name, module) for name, module in lists if len(module) == expected] or lists
    if not candidates:
        raise ModelError(
            f"{type(model).__name__} has no list of modules with parameters, so it cannot be cut or sharded by layer"
        )
    return min(candidates, key=lambda item: (item[0].count("."), -sum(p.numel() for p in item[1].parameters())))


def shared_parameters(layers: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters that several layers have."""
    counts = Counter(parameter for layer in layers for parameter in layer.parameters())
    return {parameter for parameter, count in counts.items() if count > 1}


@dataclass(frozen=True)
class ProbeOptions:
    """How a forward pass runs on the meta device.

    Attributes:
        with_mask: whether it gets a 4-D attention mask. Most models then do not read the values of
            a 2-D one, which the meta device does not have; others make their own masks.
        makes_meta: whether tensors that the model makes without naming a device are on meta.
    """

    with_mask: bool
    makes_meta: bool

    def default_device(self) -> AbstractContextManager[object]:
        """Return a context with the default device of a pass."""
        return torch.device("meta") if self.makes_meta else nullcontext()


@dataclass
class Structure:
    """What the parts of a model pass to each other, for a batch of any shape.

    Attributes:
        model: a copy without memory, of which passes are traced; it is not changed.
        layers_name: FQN of the list of decoder layers.
        num_layers: length of that list.
        options: with which a pass of the model runs on the meta device.
        trace: of the smallest batch.
    """

    model: PreTrainedModel
    layers_name: str
    num_layers: int
    options: ProbeOptions
    trace: Trace
    _traces: dict[tuple[int, int], Trace] = field(default_factory=dict)

    def at(self, batch: int, length: int) -> Trace:
        """Return the trace for a batch of `batch` sequences with `length` tokens each."""
        if (batch, length) not in self._traces:
            self._traces[batch, length] = _trace(self.model, batch, length, self.options)
        return self._traces[batch, length]

    @property
    def before(self) -> list[str]:
        """The parts that are called before the first layer."""
        return [call.name for call in self.trace.calls if call.after < 0 and call.layer is None]

    @property
    def after(self) -> list[str]:
        """The parts that are called after the last layer."""
        last = max(call.after for call in self.trace.calls)
        return [call.name for call in self.trace.calls if call.after == last and call.name != OUTPUT]


_shared: ContextVar[dict[PreTrainedModel, Structure] | None] = ContextVar("structures", default=None)


@contextmanager
def structures_shared(known: dict[PreTrainedModel, Structure] | None = None) -> Iterator[None]:
    """Probe each model once while the block runs, inside which no model may change.

    Args:
        known: structures of an earlier block, to which those of this one are added. By default
            those of the block around this one, if there is one.
    """
    outer = _shared.get() if known is None else known
    token = _shared.set({} if outer is None else outer)
    try:
        yield
    finally:
        _shared.reset(token)


def probe_structure(model: PreTrainedModel) -> Structure:
    """Return the structure of a meta model; that of an earlier call inside `structures_shared`.

    Raises:
        ModelError: if no forward pass of it runs on the meta device.
    """
    shared = _shared.get()
    if shared is None:
        return probe(model)
    if model not in shared:
        shared[model] = probe(model)
    return shared[model]


def probe(model: PreTrainedModel) -> Structure:
    """Return the structure of a meta model.

    Raises:
        ModelError: if no forward pass of it runs on the meta device.
    """
    name, layers = find_layers(model)
    failure: Exception | None = None
    for with_mask, makes_meta in itertools.product((True, False), (False, True)):
        options = ProbeOptions(with_mask, makes_meta)
        try:
            trace = _trace(model, 1, PROBE_LENGTH, options)
        except SideChannelError as error:
            raise cannot_be_cut(model, str(error)) from error
        except (*MISFITS, NotImplementedError) as error:
            failure = failure or error
        else:
            return Structure(model, name, len(layers), options, trace, {(1, PROBE_LENGTH): trace})
    assert failure is not None
    raise cannot_be_cut(model, f"it does not run on the meta device ({type(failure).__name__}: {failure})") from failure


def _trace(model: PreTrainedModel, batch: int, length: int, options: ProbeOptions) -> Trace:
    name, layers = find_layers(model)
    inputs: dict[str, object] = {**meta_inputs(batch, length, options), **no_router_logits(model)}
    with options.default_device():
        return trace_parts(model, name, layers, {**inputs, "use_cache": False}, length=length)


def meta_inputs(batch: int, length: int, options: ProbeOptions) -> Mapping[str, Tensor]:
    """Return the inputs of a forward pass on the meta device."""
    ids = torch.ones(batch, length, dtype=torch.long, device="meta")
    mask = torch.ones(batch, 1, length, length, dtype=torch.bool, device="meta")
    return {"input_ids": ids, **({"attention_mask": mask} if options.with_mask else {})}


def asks_for_router_loss(model: PreTrainedModel) -> bool:
    """Return whether the configuration asks for the auxiliary loss of the routers."""
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False))


def no_router_logits(model: PreTrainedModel) -> dict[str, bool]:
    """Return the arguments that keep a forward pass from collecting router logits.

    A stage has only the logits of its own layers.
    """
    return {"output_router_logits": False} if asks_for_router_loss(model) else {}


def cannot_be_cut(model: PreTrainedModel, reason: str) -> ModelError:
    """Return the error for a model that runs on one stage only."""
    return ModelError(f"{type(model).__name__} cannot be cut into stages: {reason}", "use pp = 1")
