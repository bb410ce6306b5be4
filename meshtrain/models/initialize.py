"""Random initialization: the same values on every mesh, without a seed checkpoint.

Hugging Face's own rules define the distribution of each parameter. Only the drawing is replaced:
values are drawn tile by tile.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, activations, initialization

from meshtrain.compat.autograd import OperatorMode, memory_of, tensors_in
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
from meshtrain.compat.nn import parameter_table, with_own_table
from meshtrain.errors import ModelError
from meshtrain.models.adapters import initialize_adapters, without_adapters
from meshtrain.models.build import stock_class, stock_like
from meshtrain.models.constructed import ConstructedTensors
from meshtrain.models.layout import local_indices, local_tensor
from meshtrain.models.rotary import forget_sequences
from meshtrain.models.tiles import fill_tiles, seeded_by

# The values of these functions do not depend on the shape of the filled tensor, so each tile can be
# filled separately. Other random functions fill the full tensor.
TILED = ("normal_", "uniform_", "trunc_normal_")
CONSTANT = ("constant_", "ones_", "zeros_")
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
    for copied, source in tied.items():
        if copied in parameters and source in parameters:
            owner, _, kind = copied.rpartition(".")
            model.get_submodule(owner).register_parameter(kind, parameters[source])
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)


@torch.no_grad()
def initialize_weights(
    model: PreTrainedModel,
    *,
    seed: int,
    names: Mapping[str, str],
    originals: Mapping[str, nn.Module] = MappingProxyType({}),
) -> None:
    """Fill all parameters and buffers of a materialized model or stage with initial values.

    The values follow the rules of Hugging Face, and those of peft for adapters.

    Args:
        model: its parameters may be DTensors. Stubs without parameters may replace modules that
            other stages hold.
        seed: of the run.
        names: parameter name in the stock model -> FQN that seeds its values. The copy of a tied
            weight on another stage uses the name of the original, so both are equal without
            communication.
        originals: name of the copy of a tied weight whose original is on another stage -> the
            module of the original, on the meta device. Its rule fills the copy.

    Raises:
        ModelError: for a parameter that neither a rule nor a constructor fills.
    """
    with without_adapters(model) as adapters:
        _initialize_stock(model, seed, names, originals)
        initialize_adapters(model, adapters, seed=seed)


def _initialize_stock(
    model: PreTrainedModel, seed: int, names: Mapping[str, str], originals: Mapping[str, nn.Module]
) -> None:
    parameters = dict(model.named_parameters())
    filler = _Filler(seed, {id(parameter): names[name] for name, parameter in parameters.items()})
    rules = _Rules(model, seed, filler, _copies(model, originals))
    with functions_replaced(filler.replace, filler.copy), rules_wrapped(rules.run):
        _apply_hf_rules(model)
        for name, original in originals.items():
            rules.run_for_copy(parameters[name], original)
    _fill_as_constructed(
        model, seed, filler, {names[n]: p for n, p in parameters.items() if id(p) not in filler.filled}
    )
    _zero_padding_rows(model)
    _complete_buffers(model)


def _copies(model: PreTrainedModel, originals: Mapping[str, nn.Module]) -> set[tuple[int, str]]:
    """Return (id of the module, name) of the parameters that have the values of another module.

    In the stock model, tied weights have the values that the rule of the original gives them.
    """
    held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = {copied for copied, source in model.all_tied_weights_keys.items() if {copied, source} <= held}
    owners = [(name.rpartition(".")[0], name.rpartition(".")[2]) for name in tied | originals.keys()]
    return {(id(model.get_submodule(owner)), kind) for owner, kind in owners}


def _fill_as_constructed(
    model: PreTrainedModel, seed: int, filler: "_Filler", parameters: Mapping[str, nn.Parameter]
) -> None:
    """Fill the parameters that no rule fills with what the constructor of the model gives them."""
    if not parameters:
        return
    constructed = ConstructedTensors(lambda: stock_like(model, torch.float32))
    unknown = [name for name in parameters if name not in constructed]
    if unknown:
        raise ModelError(
            f"{stock_class(model).__name__} has no initialization rule for {', '.join(unknown[:5])}",
            "start from pretrained weights instead",
        )
    for name, parameter in parameters.items():
        with seeded_by(f"{seed}|{name}"):
            filler.keep_part(parameter, constructed.values(name))


@torch.no_grad()
def restore_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that checkpoints do not contain, such as rotary frequencies.

    The parameters are not changed.
    """
    for parameter in model.parameters():
        mark_initialized(parameter)
    _apply_hf_rules(model)
    _complete_buffers(model)


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


def _complete_buffers(model: PreTrainedModel) -> None:
    """Fill the buffers that no rule fills with what the constructor of the model gives them."""
    empty = {n: buffer for n, buffer in model.named_buffers() if buffer.is_floating_point() and buffer.isnan().any()}
    if not empty:
        return
    constructed = ConstructedTensors(lambda: stock_like(model))
    for name, buffer in empty.items():
        value = constructed.values(name) if name in constructed else None
        if value is None or bool(value.isnan().any()):
            raise ModelError(
                f"{stock_class(model).__name__} has no rule for its buffer {name}, so it cannot be built on meta"
            )
        buffer.copy_(value)


class _Filler:
    """The replacement of torch's init functions while the rules of the model run."""

    def __init__(self, seed: int, names: dict[int, str]) -> None:
        self.seed, self.names = seed, names
        self.filled: set[int] = set()
        # Parameters that the present rule must leave as they are.
        self.kept: set[int] = set()
        self.is_busy = False

    def replace(self, kind: str, original: InitFunction) -> InitFunction:
        def fill(tensor: Tensor, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Tensor:
            if tensor.is_meta or id(tensor) in self.kept or _is_on_another_stage(tensor):
                return tensor
            self.is_busy = True
            try:
                self._fill(kind, lambda empty, **stream: original(empty, *args, **kwargs, **stream), tensor)
            finally:
                self.is_busy = False
            self.filled.add(id(tensor))
            return tensor

        return fill

    def _fill(self, kind: str, draw: InitFunction, tensor: Tensor) -> None:
        name = self.names.get(id(tensor))
        if kind in CONSTANT:
            draw(local_tensor(tensor))
        elif name is None:
            # A buffer, or a part of a parameter: the stream of the rule is seeded by its module.
            self.keep_part(tensor, draw(torch.empty(tensor.shape, dtype=torch.float32)))
        elif kind in TILED:
            # At pp = 1 a tied weight may be filled twice (as embedding, then as head), and at
            # pp = 2 once. So the key contains no count of fills: a second fill writes the same
            # values again.
            fill_tiles(tensor, lambda tile, stream: draw(tile, generator=stream), key=f"{self.seed}|{name}")
        else:
            with seeded_by(f"{self.seed}|{name}"):
                self.keep_part(tensor, draw(torch.empty(tensor.shape, dtype=torch.float32)))

    def copy(self, tensor: Tensor, value: Tensor) -> Tensor:
        """Fill a tensor with a value that the rule has computed for the full tensor."""
        if is_marked(tensor) or id(tensor) in self.kept or _is_on_another_stage(tensor):
            return tensor
        self.is_busy = True
        try:
            self.keep_part(tensor, value)
        finally:
            self.is_busy = False
        return tensor

    def keep_part(self, tensor: Tensor, value: Tensor) -> None:
        """Fill the local part of a tensor from the value of the full tensor."""
        if isinstance(tensor, DTensor) and not isinstance(value, DTensor):
            value = value.expand(tensor.shape)
            for dim, index in enumerate(local_indices(tensor)):
                value = value.index_select(dim, index.to(value.device))
            local_tensor(tensor).copy_(value)
        else:
            tensor.copy_(value)
        self.filled.add(id(tensor))


def _is_on_another_stage(tensor: Tensor) -> bool:
    """Return whether a tensor is the zeros that stand for a parameter of another stage."""
    return not isinstance(tensor, DTensor) and tensor.numel() > 1 and not any(tensor.stride())


class _Rules:
    """Runs the rules of a model, each with a stream that is seeded by the name of its module.

    A rule may fill parameters without torch's init functions: by `Tensor.uniform_`, or part by
    part. It then sees these parameters in full, in float32 on the CPU, and each process keeps its
    part.

    Args:
        model: with materialized parameters.
        seed: of the run.
        filler: replaces the init functions.
        copies: (id of a module, name) of the parameters that its rule must not fill.
    """

    def __init__(self, model: PreTrainedModel, seed: int, filler: _Filler, copies: set[tuple[int, str]]) -> None:
        self._model, self._seed, self._filler, self._copies = model, seed, filler, copies
        self._names = {id(module): name for name, module in model.named_modules()}
        self._modules = [*model.modules()]
        self._parameters = {memory_of(local_tensor(parameter)): parameter for parameter in model.parameters()}

    def run(self, module: nn.Module, rule: Rule) -> None:
        """Run a rule; its random values are the same on any mesh."""
        table = parameter_table(module)
        self._filler.kept = {id(table[kind]) for owner, kind in self._copies if owner == id(module)}
        full: dict[nn.Parameter, nn.Parameter] = {}
        while True:
            with seeded_by(f"{self._seed}|{self._names.get(id(module))}"):
                touched = self._run_with(full, rule, getattr(module, "padding_idx", None))
            if touched is None:
                break
            full[touched] = nn.Parameter(torch.empty(touched.shape, dtype=torch.float32), requires_grad=False)
        for parameter, value in full.items():
            self._filler.keep_part(parameter, value)

    def run_for_copy(self, parameter: nn.Parameter, original: nn.Module) -> None:
        """Fill the copy of a tied weight by the rule of a module on another stage."""
        twin = with_own_table(original)
        for kind, own in parameter_table(original).items():
            if own is not None and own.shape == parameter.shape:
                parameter_table(twin)[kind] = parameter
        self._copies, self._modules = set(), [twin]
        initialize_module(self._model, twin)

    def _run_with(
        self, full: Mapping[nn.Parameter, nn.Parameter], rule: Rule, padding: int | None
    ) -> nn.Parameter | None:
        """Run a rule with some parameters in full; return one more that it needs so, if any."""
        others = {memory: parameter for memory, parameter in self._parameters.items() if parameter not in full}
        watch = _Watch(self._filler, others, padding)
        names = {id(value): self._filler.names[id(parameter)] for parameter, value in full.items()}
        self._filler.names.update(names)
        try:
            with _swapped(self._modules, full), watch:
                rule()
        except _NeededInFullError:
            return watch.touched
        return None


class _NeededInFullError(Exception):
    """Ends a rule that uses a parameter by itself."""


class _Watch(OperatorMode):
    """Ends a rule as soon as it uses a parameter otherwise than by an init function."""

    def __init__(self, filler: _Filler, parameters: Mapping[int, nn.Parameter], padding: int | None) -> None:
        super().__init__()
        self._filler, self._parameters, self._padding = filler, parameters, padding
        self._padding_rows: list[Tensor] = []
        self.touched: nn.Parameter | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = func.overloadpacket.__name__
        if self._filler.is_busy or kind in ("detach", "alias"):
            return func(*args, **(kwargs or {}))
        if kind == "select" and args[2] == self._padding:
            # Rules zero this row, which `_zero_padding_rows` does on every mesh.
            self._padding_rows.append(func(*args, **(kwargs or {})))
            return self._padding_rows[-1]
        for tensor in tensors_in((args, kwargs)):
            if any(tensor is row for row in self._padding_rows):
                continue
            self.touched = self._parameters.get(memory_of(local_tensor(tensor)))
            if self.touched is not None:
                raise _NeededInFullError
        return func(*args, **(kwargs or {}))


@contextmanager
def _swapped(modules: Sequence[nn.Module], full: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """Replace parameters of modules while the block runs."""
    tables = [parameter_table(module) for module in modules] if full else []
    places = [(table, kind, value) for table in tables for kind, value in table.items() if value in full]
    for table, kind, value in places:
        table[kind] = full[value]
    try:
        yield
    finally:
        for table, kind, value in places:
            table[kind] = value


def _zero_padding_rows(model: nn.Module) -> None:
    # transformers zeroes the row only in a copy of a DTensor, and at pp = 1 the rule of a tied head
    # runs after that of the embedding. The copy of the embedding in a head on another stage has no
    # padding index of its own, so the cut sets it to that of the embedding.
    for module in model.modules():
        weight, padding_index = parameter_table(module).get("weight"), getattr(module, "padding_idx", None)
        if weight is not None and padding_index is not None:
            rows = local_indices(weight)[0]
            local_tensor(weight)[rows == padding_index] = 0
