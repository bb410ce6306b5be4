"""The initialization rules of transformers, run with replaced random functions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization
from transformers.initialization import TORCH_INIT_FUNCTIONS

_MARK = "_is_hf_initialized"
Rule = Callable[[], None]


def mark_initialized(tensor: Tensor) -> None:
    """Exclude a tensor from the initialization rules of transformers.

    Why: the rules compute buffers that are in no file, but must skip parameters, which have values
    already.
    Holds: transformers 5.17 to 5.23.
    """
    setattr(tensor, _MARK, True)


def is_marked(tensor: Tensor) -> bool:
    """Return whether a tensor is excluded from the initialization rules of transformers.

    Why: a function that replaces one of transformers must skip the same tensors.
    Holds: transformers 5.17 to 5.23.
    """
    return getattr(tensor, _MARK, False)


def forget_marks(*owners: nn.Module | Tensor) -> None:
    """Let the rules of transformers fill modules or tensors again.

    Why: transformers marks what it has filled, even on meta, and would skip it.
    Holds: transformers 5.17 to 5.23.
    """
    for owner in owners:
        vars(owner).pop(_MARK, None)


@contextmanager
def functions_replaced(
    replace: Callable[[str, Callable[..., Tensor]], Callable[..., Tensor]], copy: Callable[[Tensor, Tensor], Tensor]
) -> Iterator[None]:
    """Replace the functions that the rules of transformers call while the block runs.

    Why: weights are drawn tile by tile, alike on every mesh. All calls of `torch.nn.init`, also
    those of torch's own modules, go through one table of transformers.
    Holds: transformers 5.17 to 5.23.

    Args:
        replace: (name of a function of `torch.nn.init`, original function) -> function to call.
        copy: replaces `transformers.initialization.copy_`.
    """
    originals: dict[str, Any] = dict(TORCH_INIT_FUNCTIONS)
    copy_before = initialization.copy_
    TORCH_INIT_FUNCTIONS.update({kind: replace(kind, original) for kind, original in originals.items()})
    initialization.copy_ = copy  # type: ignore[assignment]
    try:
        yield
    finally:
        TORCH_INIT_FUNCTIONS.update(originals)
        initialization.copy_ = copy_before


@contextmanager
def rules_wrapped(wrap: Callable[[nn.Module, Rule], None]) -> Iterator[None]:
    """Run every initialization rule by `wrap(module, rule)` while the block runs.

    Why: a rule that draws random numbers itself (Mamba's time steps) needs its own seed. Models
    inside a model run their rules by the same private method.
    Holds: transformers 5.17 to 5.23.
    """
    original: Any = PreTrainedModel._initialize_weights

    def initialize(self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        wrap(module, lambda: original(self, module, *args, **kwargs))

    PreTrainedModel._initialize_weights = initialize  # type: ignore[method-assign]
    try:
        yield
    finally:
        PreTrainedModel._initialize_weights = original  # type: ignore[method-assign]


@contextmanager
def counted_as(model: PreTrainedModel, kind: Any) -> Iterator[None]:
    """Treat a model as custom code only if `kind` is, while the block runs.

    Why: transformers skips some rules for custom code (GPT-2's scaled projections). It counts every
    class outside its own modules as custom, and FSDP2 gives a model such a class.
    Holds: transformers 5.17 to 5.23.
    """
    model.is_custom_code = kind.is_custom_code  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.is_custom_code


@contextmanager
def computed_in(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype while the block runs.

    Why: transformers computes tables of positions in the default dtype while it builds a model.
    Holds: transformers 5.17 to 5.23.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
