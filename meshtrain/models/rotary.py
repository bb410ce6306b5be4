"""Rotary modules whose frequencies depend on how long the sequence is: `longrope` and `dynamic` of transformers.

Such a module looks at the largest position that a forward pass gives it. LongRoPE has a set of frequencies for short
sequences and one for long ones. Dynamic NTK makes new ones whenever a sequence is longer than all before, keeps them
for what comes then, and begins anew with a short one: what it computes depends on the sequences before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from meshtrain.compat.nn import buffer_table, restore_attributes, set_forward

# How the names of transformers end. They begin with the kind of layer, if each kind has frequencies of its own.
_GROWN, _LONG_SET = "max_seq_len_cached", "long_inv_freq"


def length_dependent(model: nn.Module) -> dict[str, Any]:
    """Return the rotary modules whose frequencies depend on the length of the sequence, by name."""
    return {name: module for name, module in model.named_modules() if any(_kinds(module))}


def grown_length(model: nn.Module) -> int:
    """Return for how many tokens dynamic frequencies have been made, 0 if they are as in the beginning."""
    lengths = [
        int(value)
        for module in length_dependent(model).values()
        for name, value in vars(module).items()
        if name.endswith(_GROWN) and value > module.original_max_seq_len
    ]
    return max(lengths, default=0)


@torch.no_grad()
def see_sequence(model: nn.Module, length: int) -> None:
    """Do to the frequencies what a forward pass over a sequence of so many tokens does."""
    for module in length_dependent(model).values():
        position = torch.tensor([[length - 1]], device=next(module.buffers()).device)
        for layer_type, _ in _kinds(module):
            own = {} if layer_type is None else {"layer_type": layer_type}
            module(position[..., None].float(), position, **own)


def forget_sequences(model: nn.Module) -> None:
    """Let frequencies that are about to be filled count as those of the beginning."""
    for module in length_dependent(model).values():
        for name in list(vars(module)):
            if name.endswith(_GROWN):
                setattr(module, name, module.original_max_seq_len)
            elif name.endswith(_LONG_SET):
                delattr(module, name)


def most_positions(config: PretrainedConfig) -> int | None:
    """Return the length that a model is made for, in tokens; None if there is none, or its frequencies grow with it."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    grows = any("dynamic" in str(rope.get("rope_type")) for rope in rope_tables(text).values())
    # XLNet says -1: its positions are relative.
    return None if grows or positions is None or positions < 0 else positions


def constant_length(model: nn.Module) -> int | None:
    """Return up to how many tokens all sequences have the same frequencies; None if longer ones have them too."""
    lengths = [
        module.original_max_seq_len
        if "dynamic" in kind
        else rope_tables(module.config)[layer_type]["original_max_position_embeddings"]
        for module in length_dependent(model).values()
        for layer_type, kind in _kinds(module)
    ]
    return min(lengths, default=None)


def rope_tables(config: Any) -> dict[str | None, dict[str, Any]]:
    """Return kind of layers -> what the configuration says of its rotary positions; None: of all."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = {layer: table for layer, table in rope.items() if isinstance(table, dict)}
    return by_layer or {None: rope}


@contextmanager
def probed(model: nn.Module, length: int) -> Iterator[None]:
    """Let a model run on the meta device, and its rotary modules be afterwards as they were.

    Args:
        length: of the sequences that it is given meanwhile, in tokens.
    """
    modules = [*length_dependent(model).values()]
    # A module registers its frequencies anew, and keeps those for long sequences in an attribute.
    kept = [(module, vars(module).copy(), buffer_table(module).copy()) for module in modules]
    for module in modules:
        set_forward(module, partial(_run_probed, module.forward, length))
    try:
        yield
    finally:
        for module, attributes, buffers in kept:
            restore_attributes(module, attributes, buffers)


def _run_probed(forward: Callable[..., Any], length: int, *args: Any, **kwargs: Any) -> Any:
    with _KnownLength(length):
        return forward(*args, **kwargs)


class _KnownLength(TorchFunctionMode):
    """Knows the largest position on the meta device, where a rotary module would look in vain."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.max, Tensor.max) and args[0].is_meta:
            return torch.tensor(self.length - 1)
        return func(*args, **(kwargs or {}))


def _kinds(module: nn.Module) -> list[tuple[str | None, str]]:
    """Return the rope types of a module that depend on the length, each with its kind of layers; None: of all."""
    rope = vars(module).get("rope_type")
    by_layer: dict[Any, Any] = rope if isinstance(rope, dict) else {None: rope}
    return [(layer, kind) for layer, kind in by_layer.items() if kind == "longrope" or "dynamic" in str(kind)]
