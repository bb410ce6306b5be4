"""Rotary modules whose frequencies depend on the length of the sequence.

They are `longrope` and `dynamic` of transformers. Such a module reads the largest position of a
forward pass. LongRoPE has one set of frequencies for short sequences and one for long ones. Dynamic
NTK computes new frequencies whenever a sequence is longer than all previous ones. It keeps them for
later sequences, and resets them at a short one, so its result depends on the previous sequences.
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

# Ends of names in transformers. The names begin with the kind of layer, if each kind has its own
# frequencies.
_GROWN, _LONG_SET = "max_seq_len_cached", "long_inv_freq"


def length_dependent(model: nn.Module) -> dict[str, Any]:
    """Return the rotary modules whose frequencies depend on the length of the sequence, by name."""
    return {name: module for name, module in model.named_modules() if any(_kinds(module))}


def grown_length(model: nn.Module) -> int:
    """Return the length that dynamic frequencies have grown to, in tokens; 0 if they have not."""
    lengths = [
        int(value)
        for module in length_dependent(model).values()
        for name, value in vars(module).items()
        if name.endswith(_GROWN) and value > module.original_max_seq_len
    ]
    return max(lengths, default=0)


@torch.no_grad()
def apply_sequence_length(model: nn.Module, length: int) -> None:
    """Change the frequencies as a forward pass over a sequence of `length` tokens does."""
    for module in length_dependent(model).values():
        position = torch.tensor([[length - 1]], device=next(module.buffers()).device)
        for layer_type, _ in _kinds(module):
            own = {} if layer_type is None else {"layer_type": layer_type}
            module(position[..., None].float(), position, **own)


def forget_sequences(model: nn.Module) -> None:
    """Reset the records of previous sequences, for frequencies that are about to be filled."""
    for module in length_dependent(model).values():
        for name in list(vars(module)):
            if name.endswith(_GROWN):
                setattr(module, name, module.original_max_seq_len)
            elif name.endswith(_LONG_SET):
                delattr(module, name)


def most_positions(config: PretrainedConfig) -> int | None:
    """Return the length that a model is made for, in tokens.

    The result is None if there is no such length, or if the frequencies grow with the sequence.
    """
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    grows = any("dynamic" in str(rope.get("rope_type")) for rope in rope_tables(text).values())
    # XLNet has -1, because its positions are relative.
    return None if grows or positions is None or positions < 0 else positions


def constant_length(model: nn.Module) -> int | None:
    """Return the length in tokens up to which all sequences have the same frequencies.

    The result is None if sequences of all lengths have the same frequencies.
    """
    lengths = [
        module.original_max_seq_len
        if "dynamic" in kind
        else rope_tables(module.config)[layer_type]["original_max_position_embeddings"]
        for module in length_dependent(model).values()
        for layer_type, kind in _kinds(module)
    ]
    return min(lengths, default=None)


def rope_tables(config: Any) -> dict[str | None, dict[str, Any]]:
    """Return kind of layers -> settings of its rotary positions; None stands for all layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = {layer: table for layer, table in rope.items() if isinstance(table, dict)}
    return by_layer or {None: rope}


@contextmanager
def probed(model: nn.Module, length: int) -> Iterator[None]:
    """Let a model run on the meta device inside the block, and then restore its rotary modules.

    Args:
        model: any model; without rotary modules of these kinds nothing is changed.
        length: of the sequences that the model gets inside the block, in tokens.
    """
    modules = [*length_dependent(model).values()]
    # A forward pass registers new frequencies, and stores those for long sequences in an attribute.
    kept = [(module, vars(module).copy(), buffer_table(module).copy()) for module in modules]
    for module in modules:
        set_forward(module, partial(_run_probed, module.forward, length))
    try:
        yield
    finally:
        for module, attributes, buffers in kept:
            restore_attributes(module, attributes, buffers)


def _run_probed(forward: Callable[..., Any], length: int, *args: Any, **kwargs: Any) -> Any:
    with _FixedLength(length):
        return forward(*args, **kwargs)


class _FixedLength(TorchFunctionMode):
    """Returns the largest position on the meta device, where a rotary module cannot compute it."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.max, Tensor.max) and args[0].is_meta:
            return torch.tensor(self.length - 1)
        return func(*args, **(kwargs or {}))


def _kinds(module: nn.Module) -> list[tuple[str | None, str]]:
    """Return (kind of layers, rope type) for the rope types of a module that depend on the length.

    The kind None stands for all layers.
    """
    rope = vars(module).get("rope_type")
    by_layer: dict[Any, Any] = rope if isinstance(rope, dict) else {None: rope}
    return [(layer, kind) for layer, kind in by_layer.items() if kind == "longrope" or "dynamic" in str(kind)]
