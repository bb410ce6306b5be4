"""float64 everywhere: transformers models cast to float32 inside norms, routers and softmax."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_MODELLING = ("transformers.", "transformers_modules.")


@contextmanager
def float32_casts_lifted() -> Iterator[None]:
    """Make loaded modeling code compute in float64 instead of float32 while the block runs.

    Why: after such a cast, a sum over processes differs from a sum inside one process by 1e-7, so a
    proof at 1e-12 would depend on equal rounding. The modules get a copy of the torch module whose
    float32 is float64. Unlike a mode of torch, this works in recomputation and under the compiler
    too.
    Holds: torch 2.11 to 2.13, transformers 5.17 to 5.23.
    """
    twin = ModuleType("torch")
    vars(twin).update(vars(torch))
    vars(twin)["float32"] = vars(twin)["float"] = torch.float64
    vars(twin)["full"] = _full
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(_MODELLING) and vars(module).get("torch") is torch
    ]
    before = vars(Tensor).get("float")
    for module in modules:
        vars(module)["torch"] = twin
    Tensor.float = _keep_float64  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        if before is None:
            # torch defines `float` in a class that Tensor derives from.
            del Tensor.float
        else:
            Tensor.float = before  # type: ignore[method-assign]
        for module in modules:
            vars(module)["torch"] = torch


def _keep_float64(self: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
    if self.dtype == torch.float64:
        return self
    # Positions meet frequencies in float64, and a product of matrices needs equal formats.
    dtype = torch.float32 if self.is_floating_point() else torch.float64
    return self.to(dtype, memory_format=memory_format)


def _full(size: Any, fill_value: Any, **kwargs: Any) -> Tensor:
    """Do `torch.full` with float64 by default: XGLM fills a float32 with the least float64."""
    if isinstance(fill_value, float):
        kwargs.setdefault("dtype", torch.float64)
    return torch.full(size, fill_value, **kwargs)
