"""Find out how a module with full parameters computes on the heads of one process.

The module runs on random numbers, once with all heads and once for each process.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshtrain.compat.autograd import flatten, unflatten
from meshtrain.parallel.cut.probe import MISFITS
from meshtrain.parallel.tensor.modules import see_heads

Behavior = Literal["alike", "per head", "joint"]
"""How a module treats the heads.

`alike`: all heads share the parameters. `per head`: every head has parameters of its own. `joint`:
the module computes over several heads at once, so its results change with a part of the heads.
"""
# Results differ by the rounding of float32, because modules of transformers cast to it.
CLOSE = 1e-4


def behavior_on_heads(module: nn.Module, full: Any, part: Any) -> Behavior:
    """Compare the results of a module on all heads with its results on the heads of each process.

    Args:
        module: on the meta device; it is not changed.
        full: nest of its arguments, (args, kwargs), with meta tensors that have all heads.
        part: the same nest with meta tensors that have the heads of one process.
    """
    leaves, spec = flatten(full)
    parts, _ = flatten(part)
    cuts = [_cut_dim(a, b) for a, b in zip(leaves, parts, strict=True)]
    sizes = {(a.shape[dim], b.shape[dim]) for a, b, dim in _cut_ones(leaves, parts, cuts)}
    counts = {-(-whole // size) for whole, size in sizes}
    if not counts:
        return "alike"
    if len(counts) > 1 or (len(sizes) > 1 and any(whole % size for whole, size in sizes)):
        return "joint"
    (ways,) = counts
    # With its own stream, the probe leaves the program's random numbers as they are.
    stream = torch.Generator().manual_seed(0)
    values = [_random(leaf, dim, stream) for leaf, dim in zip(leaves, cuts, strict=True)]

    def run(copied: nn.Module, rank: int | None) -> Tensor:
        own = values if rank is None else [_narrow(v, dim, rank, ways) for v, dim in zip(values, cuts, strict=True)]
        args, kwargs = unflatten(own, spec)
        result: Tensor = copied(*args, **kwargs)
        return result

    stock = _materialized(module, stream)
    for behavior in ("alike", "per head"):
        if _computes_the_same(stock, run, ways, per_head=behavior == "per head"):
            return behavior
    return "joint"


@torch.no_grad()
def _computes_the_same(
    stock: nn.Module, run: Callable[[nn.Module, int | None], Tensor], ways: int, *, per_head: bool
) -> bool:
    try:
        wanted = run(stock, None)
        pieces = []
        for rank in range(ways):
            copied = copy.deepcopy(stock)
            if per_head:
                see_heads(copied, partial(_own_indices, rank, ways))
            pieces.append(run(copied, rank))
        dims = [dim for dim in range(wanted.dim()) if wanted.shape[dim] != pieces[0].shape[dim]]
        return len(dims) == 1 and torch.allclose(torch.cat(pieces, dims[0]), wanted, rtol=CLOSE, atol=CLOSE)
    except MISFITS:
        return False


def _own_indices(rank: int, ways: int, count: int) -> range:
    if count < ways:
        # Several processes share a head.
        return range(rank * count // ways, rank * count // ways + 1)
    size = -(-count // ways)
    return range(rank * size, min(count, (rank + 1) * size))


@torch.no_grad()
def works_on_positions(module: nn.Module) -> bool:
    """Return whether a module with vectors of parameters computes every position alone.

    A norm or a scale does, whatever its name. A module with matrices is not tried.

    Args:
        module: on the meta device, without modules inside; it is not changed.
    """
    widths = {parameter.shape[-1] for parameter in module.parameters() if parameter.dim() == 1}
    if len(widths) != 1 or any(parameter.dim() > 1 for parameter in module.parameters()):
        return False
    stream = torch.Generator().manual_seed(0)
    copied = _materialized(module, stream)
    x = torch.randn(2, 6, *widths, generator=stream, dtype=torch.float64)
    try:
        wanted, halves = copied(x), [copied(half) for half in x.chunk(2, 1)]
    except MISFITS:
        return False
    if not isinstance(wanted, Tensor) or wanted.shape != x.shape:
        return False
    return torch.allclose(torch.cat(halves, 1), wanted, rtol=CLOSE, atol=CLOSE)


def _cut_dim(full: Any, part: Any) -> int | None:
    """Return the dimension that is split over the processes, or None."""
    if not isinstance(full, Tensor) or full.shape == part.shape:
        return None
    return next(dim for dim in range(full.dim()) if full.shape[dim] != part.shape[dim])


def _cut_ones(leaves: Sequence[Any], parts: Sequence[Any], cuts: Sequence[int | None]) -> list[tuple[Any, Any, int]]:
    return [(a, b, dim) for a, b, dim in zip(leaves, parts, cuts, strict=True) if dim is not None]


def _random(leaf: Any, dim: int | None, stream: torch.Generator) -> Any:
    """Return random values for a meta tensor, and any other argument unchanged.

    The statistics differ from head to head, so that a joint norm cannot look like one per head.
    """
    if not isinstance(leaf, Tensor):
        return leaf
    if not leaf.is_floating_point():
        return torch.zeros(leaf.shape, dtype=leaf.dtype)
    values = torch.randn(leaf.shape, generator=stream, dtype=torch.float64)
    if dim is None:
        return values
    size = leaf.shape[dim]
    scales = torch.linspace(0.5, 2.0, size, dtype=torch.float64).view(size, *[1] * (leaf.dim() - dim - 1))
    return values * scales + scales


def _narrow(value: Any, dim: int | None, rank: int, ways: int) -> Any:
    return value if dim is None else value.split(-(-value.shape[dim] // ways), dim)[rank]


def _materialized(module: nn.Module, stream: torch.Generator) -> nn.Module:
    """Return a float64 copy on the CPU with random parameters and buffers."""
    copied = copy.deepcopy(module).double().to_empty(device="cpu").eval()
    with torch.no_grad():
        for tensor in (*copied.parameters(), *copied.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=stream, dtype=torch.float64) + 0.5)
            else:
                tensor.zero_()
    return copied
