"""Find the blocks of a model that mix positions other than by attention, by a tiny copy of it.

Such blocks are convolutions, state spaces and linear attention. Where attention sees each token
alone, and a token changes, only they change anything at other positions.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.compat.transformers import attention_registered
from meshtrain.errors import ModelError
from meshtrain.parallel.context.attention import further_tensors
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.parallel.tensor.context import change_input, change_output
from meshtrain.parallel.tiny_copy import LayerKind, kinds_of_layers
from meshtrain.parallel.tiny_model import BATCH, LENGTH, copies_must_run, inputs_of, tiny_model

# The token that changes. Nothing else must change.
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
            attention through the interface of transformers, if it depends on more than positions,
            or if a tiny copy does not run.
    """
    if model not in _found:
        _found[model] = _find(model)
    return _found[model]


class _OwnPosition:
    """An attention in which every query sees the value of its own position alone."""

    def __init__(self) -> None:
        self.modules: set[nn.Module] = set()
        self.unknown: set[str] = set()
        # Queries and keys of each call, (batch, heads, seq, width).
        self.compared: list[Tensor] = []

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        self.modules.add(module)
        self.unknown |= further_tensors(kwargs)
        self.compared += query, key
        values = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return values.transpose(1, 2).contiguous(), None

    def mask(self, **kwargs: Any) -> None:
        return None


class _Block(NamedTuple):
    """A child of a layer: the name of the layer, its kind, and the own name of the child."""

    layer: str
    kind: LayerKind
    child: str


class _Seen(NamedTuple):
    """What a call of a block shows: whether it mixes positions, and how many states it takes."""

    mixes: bool
    num_states: int


def _find(model: PreTrainedModel) -> list[str]:
    tiny, attention = tiny_model(model, 1).eval(), _OwnPosition()
    seen: dict[_Block, _Seen] = {}
    with copies_must_run(tiny, "does not run in the trial of cp, where attention gets no mask"), torch.no_grad():
        tiny.set_attn_implementation(attention_registered(attention))
        with ExitStack() as hooks:
            for at, block in _blocks(tiny).items():
                look = partial(_look, seen, at)
                hooks.enter_context(block.register_forward_hook(look, with_kwargs=True))
            tiny(**inputs_of(tiny), use_cache=False)
        mixing = {at: block for at, block in _blocks(tiny).items() if at in seen and seen[at].mixes}
        mixes_elsewhere = _mixes_without(tiny, list(mixing.values()))
        counts_places = _counts_places(tiny, list(mixing.values()), attention)
    name, states = type(model).__name__, {at: seen[at].num_states for at in mixing}
    refusals = _refusals(name, attention, mixing, states, mixes_elsewhere=mixes_elsewhere, counts_places=counts_places)
    if (reason := next(refusals, None)) is not None:
        raise ModelError(reason)
    kinds = {at[1:] for at in mixing}
    return [f"{at.layer}.{at.child}" for at in _blocks(model) if at[1:] in kinds]


def _refusals(
    name: str,
    attention: _OwnPosition,
    mixing: Mapping[_Block, nn.Module],
    states: Mapping[_Block, int],
    *,
    mixes_elsewhere: bool,
    counts_places: bool,
) -> Iterator[str]:
    """Yield why a class cannot compute parts of sequences, from what its tiny copy did."""
    if not attention.modules:
        yield (
            f"{name} does not compute attention through the interface of transformers, so the tokens of a part would "
            "see that part only"
        )
    if mixes_elsewhere:
        yield f"{name} mixes positions outside attention and outside the blocks of its layers"
    for at, block in mixing.items():
        if attention.modules & {*block.modules()}:
            yield f"{at.child} in the layers of {name} mixes positions by attention and in another way too"
        if states[at] > 1:
            yield f"{at.child} in the layers of {name} mixes positions and takes several hidden states"
    if attention.unknown:
        yield f"the attention of {name} gets {sorted(attention.unknown)[0]}, which may be that of a part"
    if counts_places:
        yield f"{name} counts the tokens that a process has to compute queries or keys, not their positions"


def _blocks(model: PreTrainedModel) -> dict[_Block, nn.Module]:
    name, layers = find_layers(model)
    return {
        _Block(f"{name}.{index}", kind, child): block
        for index, (kind, layer) in enumerate(zip(kinds_of_layers(model), layers, strict=True))
        for child, block in layer.named_children()
    }


def _look(
    seen: dict[_Block, _Seen],
    at: _Block,
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    """Call a block again with one token changed, and note whether the output changes elsewhere."""
    given = [it for it in (*args, *kwargs.values()) if isinstance(it, Tensor) and it.is_floating_point()]
    states = [it for it in given if it.dim() == 3 and it.shape[:2] == (BATCH, LENGTH)]
    if not states or not isinstance(_first(output), Tensor):
        return
    changed_args, changed_kwargs = change_input(_change, block, args, kwargs)
    # Not the module itself, whose hooks would call it again.
    again = block.forward(*changed_args, **changed_kwargs)
    seen[at] = _Seen(_differ_elsewhere(_first(output), _first(again)), len(states))


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _change(hidden: Tensor) -> Tensor:
    changed = hidden.clone()
    changed[:, CHANGED] = 1.0 - 0.5 * changed[:, CHANGED]
    return changed


def _mixes_without(tiny: PreTrainedModel, blocks: Iterable[nn.Module]) -> bool:
    """Return whether a changed token changes logits elsewhere, if some blocks return zeros."""
    inputs = inputs_of(tiny)
    ids = inputs["input_ids"].clone()
    ids[:, CHANGED] = (ids[:, CHANGED] + 1) % tiny.config.get_text_config().vocab_size
    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_hook(partial(change_output, torch.zeros_like)))
        one, other = (tiny(**inputs | {"input_ids": it}, use_cache=False).logits for it in (inputs["input_ids"], ids))
    return _differ_elsewhere(one, other)


def _counts_places(tiny: PreTrainedModel, blocks: Iterable[nn.Module], attention: _OwnPosition) -> bool:
    """Return whether queries or keys change if a copy gets the second half of its tokens alone.

    Args:
        tiny: the copy, in which attention sees each token alone.
        blocks: whose results are left out, because they mix positions.
        attention: of the copy.
    """
    if "position_ids" not in inspect.signature(type(tiny).forward).parameters:
        return False
    whole = {**inputs_of(tiny), "position_ids": torch.arange(LENGTH).expand(BATCH, LENGTH)}
    found = []
    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_hook(partial(change_output, torch.zeros_like)))
        for first in (0, LENGTH // 2):
            attention.compared.clear()
            part = {name: it[:, first:] if isinstance(it, Tensor) else it for name, it in whole.items()}
            tiny(**part, use_cache=False)
            found.append([*attention.compared])
    pairs = ((one[..., -other.shape[-2] :, :], other) for one, other in zip(*found, strict=True))
    return any(bool((one - other).abs().max() > CLOSE * other.abs().max()) for one, other in pairs)


def _differ_elsewhere(one: Tensor, other: Tensor) -> bool:
    # Some blocks return (batch * seq, hidden).
    difference = (one - other).abs().reshape(BATCH, LENGTH, -1)
    difference[:, CHANGED] = 0.0
    return bool(difference.max() > CLOSE * one.abs().max())
