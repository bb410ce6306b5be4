"""Run a model on the meta device with hidden states that are split along the sequence.

The pass has the shapes that sequence parallelism gives on one process. A layer that combines its
part of the sequence with something of full length, or that joins batch and sequence, fails here.
"""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.compat.autograd import OperatorMode, all_entries_nonzero, memory_of, tensors_in
from meshtrain.compat.transformers import attention_implementation, set_attention_implementation
from meshtrain.config.plan import Style
from meshtrain.models.patterns import as_pattern
from meshtrain.models.probe_inputs import probe_ids, probe_mask
from meshtrain.models.rotary import probed
from meshtrain.parallel.cut.hooks import hooks_disabled
from meshtrain.parallel.cut.meta import KnownLists, WithoutValues
from meshtrain.parallel.cut.probe import MISFITS, find_layers, no_router_logits
from meshtrain.parallel.tensor.collectives import SEQUENCE_DIM
from meshtrain.parallel.tensor.context import change_input, change_output
from meshtrain.parallel.tensor.rules import TensorRules, blocks_of
from meshtrain.parallel.tensor.styles import STYLES

# Sizes that tell batch and sequence apart, also where they are joined.
BATCH, PART = 3, 5


class CannotSplitError(Exception):
    """Ends a pass in which the hidden states cannot be split."""


class SeesUses(OperatorMode):
    """Dispatch mode that ends a pass which uses a parameter on a part of the sequence.

    Gradients of most parameters are complete only where every process has all tokens.
    """

    def __init__(self, model: nn.Module, rules: TensorRules) -> None:
        super().__init__()
        # Tensors are kept alive, so that their memory is not reused for others.
        self._kept: list[Tensor] = []
        self._full = {
            memory_of(parameter): name
            for name, parameter in model.named_parameters()
            if not _is_summed(name, rules.styles.get(name.rpartition(".")[0]))
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = tensors_in((args, kwargs))
        names = [self._full.get(memory_of(tensor)) for tensor in inputs]
        used = next((name for name in names if name is not None), None)
        if used is not None and any(map(_is_part, inputs)):
            raise CannotSplitError(f"{as_pattern(used)} is used on a part of the sequence, outside of its module")
        result = func(*args, **(kwargs or {}))
        if used is not None and None not in names:
            # What is computed from parameters alone has the gradient of a parameter.
            for tensor in tensors_in(result):
                self._full[memory_of(tensor)] = used
                self._kept.append(tensor)
        return result


def _is_part(tensor: Tensor) -> bool:
    return tensor.shape[:2] == (BATCH, PART) or tensor.shape[:1] == (BATCH * PART,)


def _is_summed(parameter: str, style: Style | None) -> bool:
    """Return whether the gradient of a parameter on a part of the sequence is summed over tp."""
    gradients = "full" if style is None else STYLES[style].gradients
    return gradients in ("partial", "partial if split") or (
        gradients == "bias partial if split" and parameter.endswith(".bias")
    )


def why_not_split(model: PreTrainedModel, rules: TensorRules, tp: int) -> str | None:
    """Return why hidden states cannot be split along the sequence; None if they can.

    Args:
        model: on the meta device, unfused; it is not changed. It runs on meta with hidden states
            that are not split.
        rules: of the model.
        tp: number of processes that share the sequence.
    """
    failure: str | None = None
    for with_mask in (True, False):
        try:
            _run(model, None, tp, with_mask=with_mask)
        except MISFITS as error:
            failure = failure or _first_line(error)
            continue
        try:
            _run(model, rules, tp, with_mask=with_mask)
        except CannotSplitError as error:
            return str(error)
        except MISFITS as error:
            return f"its layers combine a part of the sequence with the full sequence ({_first_line(error)})"
        return None
    return f"its layers do not run without values ({failure})"


def _run(model: PreTrainedModel, rules: TensorRules | None, tp: int, *, with_mask: bool) -> None:
    """Run a copy, with split hidden states if there are rules."""
    length = tp * PART
    copied = copy.deepcopy(model)
    if attention_implementation(copied.config) not in ("eager", "sdpa"):
        # Kernels for one kind of device do not run on meta. The shapes are the same with SDPA.
        set_attention_implementation(copied.config, "sdpa")
    with ExitStack() as stack:
        stack.enter_context(hooks_disabled(copied))
        if rules is not None:
            _split(copied, rules, length)
            stack.enter_context(SeesUses(copied, rules))
        stack.enter_context(probed(copied, length))
        stack.enter_context(torch.no_grad())
        stack.enter_context(all_entries_nonzero())
        stack.enter_context(KnownLists())
        stack.enter_context(WithoutValues())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        copied.train()
        ids = probe_ids(next(copied.parameters()).device, BATCH, length)
        mask = probe_mask(ids.device, length, with_mask=with_mask)
        copied(input_ids=ids, **mask, **no_router_logits(copied), use_cache=False)


def _split(model: PreTrainedModel, rules: TensorRules, length: int) -> None:
    """Give the modules of a model the lengths that they have on one process."""
    name, layers = find_layers(model)
    narrow, widen = (partial(_change, before, after) for before, after in ((length, PART), (PART, length)))
    layers[0].register_forward_pre_hook(partial(change_input, partial(narrow, f"{name}.0")), with_kwargs=True)
    layers[-1].register_forward_hook(partial(change_output, partial(widen, f"{name}.{len(layers) - 1}")))
    for below, module in layers.named_modules(prefix=name):
        style = rules.styles.get(below)
        if style is None or any(blocks_of(below, rules.styles, "full sequence")):
            continue
        row = STYLES[style]
        is_entered = any(blocks_of(below, rules.styles, "shared input"))
        if row.kind in ("shared input", "full sequence") or (row.enters and not is_entered):
            _before(module, partial(widen, below))
        if row.kind == "full sequence" or row.takes_cut:
            module.register_forward_hook(partial(change_output, partial(narrow, below)))


def _before(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    module.register_forward_pre_hook(partial(change_input, change), with_kwargs=True)


def _change(before: int, after: int, name: str, x: Tensor) -> Tensor:
    """Return a tensor of another length, after a look at the shape of `x`."""
    if x.dim() < 3 or x.shape[SEQUENCE_DIM] != before:
        words = {PART: "seq / tp", max(before, after): "seq", BATCH: "batch", BATCH * PART: "batch * seq / tp"}
        found = ", ".join([*(words.get(size, str(size)) for size in x.shape[:-1]), str(x.shape[-1])])
        raise CannotSplitError(f"{as_pattern(name)} has ({found}) instead of (batch, {words[before]}, hidden)")
    return x.new_empty(*x.shape[:SEQUENCE_DIM], after, *x.shape[SEQUENCE_DIM + 1 :])


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
