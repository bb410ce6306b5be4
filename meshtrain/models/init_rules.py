"""Run the rules of initialization so that every process keeps its part of the same values."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from meshtrain.compat.autograd import OperatorMode, memory_of, tensors_in
from meshtrain.compat.initialization import Rule, is_marked, mark_initialized
from meshtrain.compat.nn import parameter_table
from meshtrain.models.fused import UnfusedProjection
from meshtrain.models.layout import local_indices, local_tensor
from meshtrain.models.tiles import fill_tiles, seeded_by

# The values of these functions do not depend on the shape of the filled tensor, so each tile can be
# filled separately. Other random functions fill the full tensor.
TILED = ("normal_", "uniform_", "trunc_normal_")
CONSTANT = ("constant_", "ones_", "zeros_")
InitFunction = Callable[..., Tensor]


class Filler:
    """The replacement of torch's init functions while the rules of the model run."""

    def __init__(self, seed: int, names: dict[int, str]) -> None:
        self.seed, self.names = seed, names
        self.filled: set[int] = set()
        self.is_busy = False

    def replace(self, kind: str, original: InitFunction) -> InitFunction:
        """Return what runs instead of an init function: it fills this process's part."""

        def fill(tensor: Tensor, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Tensor:
            if tensor.is_meta or _is_on_another_stage(tensor):
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
        if tensor.is_meta or is_marked(tensor) or _is_on_another_stage(tensor):
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


class Rules:
    """Runs the rules of a model, each with a stream that is seeded by the name of its module.

    A rule may fill parameters without torch's init functions: by `Tensor.uniform_`, or part by
    part. It then sees these parameters in full, in float32 on the CPU, and each process keeps its
    part.

    Args:
        model: with materialized parameters.
        seed: of the run.
        filler: replaces the init functions.
        keeps: False: only buffers are filled.
    """

    def __init__(self, model: PreTrainedModel, seed: int, filler: Filler, *, keeps: bool = True) -> None:
        self._seed, self._filler, self._keeps = seed, filler, keeps
        self._names = {id(module): name for name, module in model.named_modules()}
        self._modules = [*model.modules()]
        self._parameters = {memory_of(local_tensor(p)): p for p in model.parameters() if not p.is_meta}

    def run(self, module: nn.Module, rule: Rule) -> None:
        """Run a rule; its random values are the same on any mesh."""
        full: dict[nn.Parameter, nn.Parameter] = {}
        while True:
            with seeded_by(f"{self._seed}|{self._names.get(id(module))}"), self._fused_in_full(module):
                # A rule that zeroes the row of the padding changes the parameter.
                padding = getattr(module, "padding_idx", None) if self._keeps else None
                touched = self._run_with(full, rule, padding)
            if touched is None:
                break
            full[touched] = nn.Parameter(torch.empty(touched.shape, dtype=torch.float32), requires_grad=False)
            if is_marked(touched):
                mark_initialized(full[touched])
        if self._keeps:
            for parameter, value in full.items():
                self._filler.keep_part(parameter, value)

    @contextmanager
    def _fused_in_full(self, module: nn.Module) -> Iterator[None]:
        """Let a rule fill the projections of a module that are in parts as if they were in one."""
        unfused = [child for child in module.children() if isinstance(child, UnfusedProjection)]
        for child in unfused:
            child.written = {}
        try:
            yield
        finally:
            for child in unfused:
                written, child.written = child.written, None
                for kind, value in (written or {}).items() if self._keeps else ():
                    for parameter, part in child.split(kind, value):
                        self._filler.keep_part(parameter, part)

    def _run_with(
        self, full: Mapping[nn.Parameter, nn.Parameter], rule: Rule, padding: int | None
    ) -> nn.Parameter | None:
        """Run a rule with some parameters in full; return one more that it needs so, if any."""
        watch = _Watch(self._filler, self._parameters, full, padding)
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
    """Ends a rule as soon as it uses a parameter otherwise than by an init function.

    Args:
        filler: does what the init functions do.
        parameters: memory -> parameter.
        full: the parameters that are there in full.
        padding: the row of the padding in an embedding, if the rule may change it.
    """

    def __init__(
        self,
        filler: Filler,
        parameters: Mapping[int, nn.Parameter],
        full: Mapping[nn.Parameter, nn.Parameter],
        padding: int | None,
    ) -> None:
        super().__init__()
        self._filler, self._parameters, self._full, self._padding = filler, parameters, full, padding
        self._padding_rows: list[Tensor] = []
        self.touched: nn.Parameter | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = func.overloadpacket.__name__
        if self._filler.is_busy or kind in ("detach", "alias"):
            return func(*args, **(kwargs or {}))
        if kind == "select" and self._padding is not None and args[2] == self._padding:
            # Rules zero this row, which `_zero_padding_rows` does on every mesh.
            self._padding_rows.append(func(*args, **(kwargs or {})))
            return self._padding_rows[-1]
        for tensor in tensors_in((args, kwargs)):
            if any(tensor is row for row in self._padding_rows):
                continue
            found = self._parameters.get(memory_of(local_tensor(tensor)))
            if found is not None and found not in self._full:
                self.touched = found
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
