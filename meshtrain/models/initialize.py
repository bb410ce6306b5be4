"""Random initialization: the same values on every mesh, without a seed checkpoint.

Hugging Face's own rules define the distribution of each parameter. Only the drawing is replaced:
values are drawn tile by tile.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, activations, initialization

from meshtrain.compat.autograd import OperatorMode
from meshtrain.compat.initialization import (
    Rule,
    computed_in,
    counted_as,
    forget_marks,
    functions_replaced,
    initialize_module,
    is_marked,
    mark_initialized,
    rules_wrapped,
)
from meshtrain.errors import ModelError
from meshtrain.models.adapters import initialize_adapters, without_adapters
from meshtrain.models.build import stock_class
from meshtrain.models.layout import local_indices, local_tensor
from meshtrain.models.rotary import forget_sequences
from meshtrain.models.tiles import fill_tiles, seeded_stream

# The values of these functions do not depend on the shape of the filled tensor, so each tile can be
# filled separately.
TILED = ("normal_", "uniform_", "trunc_normal_")
CONSTANT = ("constant_", "ones_", "zeros_")
DRAWS = ("normal_", "uniform_", "exponential_", "random_", "bernoulli_")
InitFunction = Callable[..., Tensor]


@torch.no_grad()
def materialize(
    model: nn.Module,
    device: torch.device,
    *,
    tied: Mapping[str, str],
    parameter_device: torch.device | None = None,
) -> None:
    """Allocate memory on `device` for a meta model, without values.

    Args:
        model: already cut and sharded. Each process allocates only its shards.
        device: of the buffers, and of the parameters unless these are offloaded.
        tied: name of a tied parameter -> name of its original. Where `model` holds both, they are
            made one parameter again, because `to_empty` separates them.
        parameter_device: of the parameters, if they are offloaded.
    """
    model.to_empty(device=parameter_device or device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for copy, source in tied.items():
        if copy in parameters and source in parameters:
            owner, _, kind = copy.rpartition(".")
            model.get_submodule(owner).register_parameter(kind, parameters[source])
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)


@torch.no_grad()
def initialize_weights(model: PreTrainedModel, *, seed: int, names: Mapping[str, str]) -> None:
    """Fill all parameters and buffers of a materialized model or stage with initial values.

    The values follow the rules of Hugging Face, and those of peft for adapters.

    Args:
        model: its parameters may be DTensors. Stubs without parameters may replace modules that
            other stages hold.
        seed: of the run.
        names: parameter name in the stock model -> FQN that seeds its values. The copy of a tied
            weight on another stage uses the name of the original, so both are equal without
            communication.

    Raises:
        ModelError: for a parameter whose rule cannot be reproduced on every mesh.
    """
    with without_adapters(model) as adapters:
        _initialize_stock(model, seed, names)
        initialize_adapters(model, adapters, seed=seed)


def _initialize_stock(model: PreTrainedModel, seed: int, names: Mapping[str, str]) -> None:
    filler = _Filler(seed, {id(parameter): names[name] for name, parameter in model.named_parameters()})
    with functions_replaced(filler.replace, filler.copy), _seeded_rules(model, seed), _NoShardedDraws(model):
        _apply_hf_rules(model)
        for name, parameter in model.named_parameters():
            if names[name] != name:
                _check_twin(model, name, parameter, filler)
    untouched = [names[name] for name, parameter in model.named_parameters() if id(parameter) not in filler.filled]
    if untouched:
        raise ModelError(
            f"{stock_class(model).__name__} has no initialization rule that can be repeated on every mesh for "
            f"{', '.join(untouched[:5])}",
            "start from pretrained weights instead",
        )
    _zero_padding_rows(model)
    _check_buffers(model)


@torch.no_grad()
def restore_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that checkpoints do not contain, such as rotary frequencies.

    The parameters are not changed.
    """
    for parameter in model.parameters():
        mark_initialized(parameter)
    _apply_hf_rules(model)
    _check_buffers(model)


def _apply_hf_rules(model: PreTrainedModel) -> None:
    forget_marks(*model.modules())
    forget_sequences(model)
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    with counted_as(model, stock_class(model)), computed_in(dtype):
        _initialize_activations(model)
        model.initialize_weights()


def _initialize_activations(model: nn.Module) -> None:
    """Fill the parameters and buffers of activations, such as xIELU.

    The only rule that transformers has for them is their constructor.
    """
    for module in model.modules():
        kind = next((kind for kind in type(module).__mro__ if kind.__module__ == activations.__name__), None)
        own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        if kind is not None and own:
            new = kind()
            for name, tensor in own.items():
                initialization.copy_(tensor, getattr(new, name))


def _check_twin(model: PreTrainedModel, name: str, head: nn.Parameter, filler: "_Filler") -> None:
    """Check that the rule of a head would fill its embedding in the same way.

    The reason is that the stage of the embedding runs only the rule of the embedding.
    """
    with torch.device("meta"):
        embedding = nn.Embedding(head.shape[0], head.shape[1])
    initialize_module(model, embedding)
    if filler.described.get(id(head)) != filler.described.get(id(embedding.weight)):
        raise ModelError(
            f"{stock_class(model).__name__} initializes {name} in another way than the embedding that it is tied to",
            "start from pretrained weights instead, or use pp = 1",
        )


def _check_buffers(model: PreTrainedModel) -> None:
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and bool(buffer.isnan().any()):
            raise ModelError(
                f"{stock_class(model).__name__} has no rule for its buffer {name}, so it cannot be built on meta"
            )


class _Filler:
    """The replacement of torch's init functions while the rules of the model run."""

    def __init__(self, seed: int, names: dict[int, str]) -> None:
        self.seed, self.names = seed, names
        self.filled: set[int] = set()
        self.described: dict[int, object] = {}

    def replace(self, kind: str, original: InitFunction) -> InitFunction:
        def fill(tensor: Tensor, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Tensor:
            name = self.names.get(id(tensor))
            self.described[id(tensor)] = (kind, args, kwargs)
            if tensor.is_meta:
                return tensor
            if kind in CONSTANT:
                original(local_tensor(tensor), *args, **kwargs)
            elif name is None:
                raise ModelError(
                    f"a buffer, or a part of a parameter, is initialized by {kind}, which cannot be repeated on every "
                    "mesh",
                    "start from pretrained weights instead",
                )
            elif kind in TILED:
                # At pp = 1 a tied weight may be filled twice (as embedding, then as head), and at
                # pp = 2 once. So the key contains no count of fills: a second fill writes the same
                # values again.
                fill_tiles(
                    tensor,
                    lambda tile, stream: original(tile, *args, generator=stream, **kwargs),
                    key=f"{self.seed}|{name}",
                )
            else:
                raise ModelError(
                    f"{name} is initialized by {kind}, which needs the full tensor and so cannot be repeated on every "
                    "mesh",
                    "start from pretrained weights instead",
                )
            self.filled.add(id(tensor))
            return tensor

        return fill

    def copy(self, tensor: Tensor, value: Tensor) -> Tensor:
        """Fill a tensor with a value that the rule has computed for the full tensor."""
        if is_marked(tensor):
            return tensor
        if isinstance(tensor, DTensor) and not isinstance(value, DTensor):
            value = value.expand(tensor.shape)
            for dim, index in enumerate(local_indices(tensor)):
                value = value.index_select(dim, index.to(value.device))
            local_tensor(tensor).copy_(value)
        else:
            tensor.copy_(value)
        self.filled.add(id(tensor))
        return tensor


class _NoShardedDraws(OperatorMode):
    """A check that no rule draws a sharded tensor itself, without torch's init functions.

    Each process would draw its own part.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = func.overloadpacket.__name__
        if kind in DRAWS and isinstance(args[0], DTensor):
            raise ModelError(
                f"{stock_class(self.model).__name__} initializes a parameter by Tensor.{kind}, which cannot be "
                "repeated on every mesh",
                "start from pretrained weights instead",
            )
        return func(*args, **(kwargs or {}))


def _seeded_rules(model: PreTrainedModel, seed: int) -> AbstractContextManager[None]:
    """Seed each rule that draws values itself (Mamba's time steps) by the name of its module.

    It then draws the same values on any stage.
    """
    names = {id(module): name for name, module in model.named_modules()}

    def run(module: nn.Module, rule: Rule) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeded_stream(f"{seed}|{names.get(id(module))}").initial_seed())
            rule()

    return rules_wrapped(run)


def _zero_padding_rows(model: nn.Module) -> None:
    # transformers zeroes the row only in a copy of a DTensor, and at pp = 1 the rule of a tied head
    # runs after that of the embedding. The copy of the embedding in a head on another stage has no
    # padding index of its own, so the cut sets it to that of the embedding.
    for module in model.modules():
        padding_index, weight = getattr(module, "padding_idx", None), getattr(module, "weight", None)
        if padding_index is not None and isinstance(weight, Tensor):
            rows = local_indices(weight)[0]
            local_tensor(weight)[rows == padding_index] = 0
