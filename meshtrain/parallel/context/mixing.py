"""Find the blocks of a model that mix positions other than by attention, by a tiny copy of it.

Such blocks are convolutions, state spaces and linear attention. Where attention sees each token
alone, and a token changes, only they change anything at other positions.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.compat.transformers import attention_registered
from meshtrain.errors import ModelError
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.parallel.tensor.context import change_input, change_output
from meshtrain.parallel.tensor.dataflow.copies import copies_must_run, inputs_of, tiny_model
from meshtrain.parallel.tiny_copy import LayerKind, kinds_of_layers

# The token that changes. Those behind it must not.
CHANGED = 1
# Relative to the largest value. The results of a float32 cast inside a model differ by less.
CLOSE = 1e-5
_found: WeakKeyDictionary[PreTrainedModel, list[str]] = WeakKeyDictionary()


def mixing_blocks(model: PreTrainedModel) -> list[str]:
    """Return the names of the blocks of a model that mix positions other than by attention.

    Args:
        model: stock, on the meta device; it is not changed.

    Raises:
        ModelError: if positions are mixed outside the blocks of layers, if no layer computes
            attention through the interface of transformers, or if a tiny copy does not run.
    """
    if model not in _found:
        _found[model] = _find(model)
    return _found[model]


class _OwnPosition:
    """An attention in which every query sees the value of its own position alone."""

    def __init__(self) -> None:
        self.modules: set[nn.Module] = set()

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        self.modules.add(module)
        values = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return values.transpose(1, 2).contiguous(), None

    def mask(self, **kwargs: Any) -> None:
        return None


def _find(model: PreTrainedModel) -> list[str]:
    tiny, attention = tiny_model(model, 1).eval(), _OwnPosition()
    inputs = inputs_of(tiny)
    with copies_must_run(tiny), torch.no_grad():
        tiny.set_attn_implementation(attention_registered(attention))
        found = {it: block for it, block in _blocks(tiny).items() if _mixes(tiny, block, inputs)}
        several = [child for (_, _, child), block in found.items() if _takes_several(tiny, block, inputs)]
        mixes_elsewhere = _mixes_without(tiny, list(found.values()), inputs)
    type_name = type(model).__name__
    if not attention.modules:
        raise ModelError(
            f"{type_name} does not compute attention through the interface of transformers, so the tokens of a part "
            "would see that part only"
        )
    if mixes_elsewhere:
        raise ModelError(f"{type_name} mixes positions outside attention and outside the blocks of its layers")
    if both := [child for (_, _, child), block in found.items() if attention.modules & {*block.modules()}]:
        raise ModelError(f"{both[0]} in the layers of {type_name} mixes positions by attention and in another way too")
    if several:
        raise ModelError(f"{several[0]} in the layers of {type_name} mixes positions and takes several hidden states")
    kinds = {(kind, child) for (_, kind, child) in found}
    return [f"{name}.{child}" for name, kind, child in _blocks(model) if (kind, child) in kinds]


def _blocks(model: PreTrainedModel) -> dict[tuple[str, LayerKind, str], nn.Module]:
    """Return the children of the layers of a model, by layer, its kind, and their own name."""
    name, layers = find_layers(model)
    return {
        (f"{name}.{index}", kind, child): block
        for index, (kind, layer) in enumerate(zip(kinds_of_layers(model), layers, strict=True))
        for child, block in layer.named_children()
    }


def _mixes(tiny: PreTrainedModel, block: nn.Module, inputs: dict[str, Any]) -> bool:
    """Return whether a change of one token in the input of a block changes its output elsewhere."""
    outputs: list[Tensor] = []
    with _called(block, outputs):
        tiny(**inputs, use_cache=False)
        with _changed_input(block):
            tiny(**inputs, use_cache=False)
    if not outputs:
        # It returns no tensor, or is not called.
        return False
    one, other = outputs
    return _differ_elsewhere(one, other, inputs["input_ids"])


def _takes_several(tiny: PreTrainedModel, block: nn.Module, inputs: dict[str, Any]) -> bool:
    """Return whether a block takes more than one tensor (batch, seq, hidden)."""
    shape, numbers = inputs["input_ids"].shape, list[int]()

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [it for it in (*args, *kwargs.values()) if isinstance(it, Tensor) and it.is_floating_point()]
        numbers.append(sum(it.dim() == 3 and it.shape[:2] == shape for it in given))

    with _hook(block.register_forward_pre_hook(count, with_kwargs=True)):
        tiny(**inputs, use_cache=False)
    return max(numbers) > 1


def _mixes_without(tiny: PreTrainedModel, blocks: list[nn.Module], inputs: dict[str, Any]) -> bool:
    """Return whether a changed token changes logits elsewhere, if some blocks return zeros."""
    ids = inputs["input_ids"].clone()
    vocabulary = tiny.config.get_text_config().vocab_size
    ids[:, CHANGED] = (ids[:, CHANGED] + 1) % vocabulary
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(_hook(block.register_forward_hook(partial(change_output, torch.zeros_like))))
        one = tiny(**inputs, use_cache=False).logits
        other = tiny(**{**inputs, "input_ids": ids}, use_cache=False).logits
    return _differ_elsewhere(one, other, ids)


def _differ_elsewhere(one: Tensor, other: Tensor, ids: Tensor) -> bool:
    # Some blocks return (batch * seq, hidden).
    difference = (one - other).abs().reshape(*ids.shape, -1)
    difference[:, CHANGED] = 0.0
    return bool(difference.max() > CLOSE * one.abs().max())


@contextmanager
def _hook(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _called(block: nn.Module, outputs: list[Tensor]) -> Any:
    def note(module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            outputs.append(first)

    return _hook(block.register_forward_hook(note))


def _changed_input(block: nn.Module) -> Any:
    def change(hidden: Tensor) -> Tensor:
        changed = hidden.clone()
        changed.select(-2, CHANGED).mul_(-0.5).add_(1.0)
        return changed

    change_first: Callable[..., Any] = partial(change_input, change)
    return _hook(block.register_forward_pre_hook(change_first, with_kwargs=True))
