"""transformers' initialisation: its rules are run with other functions that draw, and put back."""

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
    """Let the rules of transformers leave a tensor alone.

    Why: buffers that are in no file are computed by the same rules as parameters, which have values already.
    Holds: transformers 5.17 to 5.23.
    """
    setattr(tensor, _MARK, True)


def is_marked(tensor: Tensor) -> bool:
    """Tell whether the rules of transformers leave a tensor alone.

    Why: a function that stands in for one of its own must do the same.
    Holds: transformers 5.17 to 5.23.
    """
    return getattr(tensor, _MARK, False)


def forget_marks(*owners: nn.Module | Tensor) -> None:
    """Let the rules of transformers fill modules or tensors, although they did so before.

    Why: it marks what it has filled, on meta already, and would skip it.
    Holds: transformers 5.17 to 5.23.
    """
    for owner in owners:
        vars(owner).pop(_MARK, None)


def initialize_module(model: PreTrainedModel, module: nn.Module) -> None:
    """Run the rule that a model has for a module, which need not be its own.

    Why: the public method runs the rules for all modules of the model.
    Holds: transformers 5.17 to 5.23.
    """
    model._initialize_weights(module)


@contextmanager
def functions_replaced(
    replace: Callable[[str, Callable[..., Tensor]], Callable[..., Tensor]], copy: Callable[[Tensor, Tensor], Tensor]
) -> Iterator[None]:
    """Let the rules of transformers call other functions while the block runs.

    Why: weights are drawn tile by tile, alike on every mesh. transformers sends all calls of `torch.nn.init` through
    one table of the process, also those of torch's own modules.
    Holds: transformers 5.17 to 5.23.

    Args:
        replace: name of a function of `torch.nn.init`, and what transformers calls -> what it is to call.
        copy: stands in for `transformers.initialization.copy_`.
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
    """Let every rule be run by `wrap(module, rule)` while the block runs.

    Why: a rule that draws by itself (Mamba's time steps) needs a seed of its own, and models inside of a model run
    theirs by the same private method of their class.
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
    """Let a model count as custom code only if `kind` does, while the block runs.

    Why: transformers leaves out some rules of custom code (GPT-2's scaled projections). It takes every class for that
    whose module is not its own, and FSDP2 gives a model such a class.
    Holds: transformers 5.17 to 5.23.
    """
    model.is_custom_code = kind.is_custom_code  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.is_custom_code


@contextmanager
def computed_in(dtype: torch.dtype) -> Iterator[None]:
    """Let tensors without a number format have this one while the block runs.

    Why: transformers computes tables of positions in this type while it builds a model.
    Holds: transformers 5.17 to 5.23.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
