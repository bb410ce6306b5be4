"""Find out whether rules compute what a model computes, by running it as each of several processes.

Every projection receives and returns what it would on that process, cut from a run of the whole
model. So a wrong part shows at the first projection that receives it, without other processes.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.compat.autograd import tensors_in
from meshtrain.compat.nn import set_forward
from meshtrain.parallel.cut.probe import MISFITS
from meshtrain.parallel.tensor.head_share import heads_of, uneven_heads
from meshtrain.parallel.tensor.heads import apply_local_heads, drop_full_biases, local_slices, take_own_parameters
from meshtrain.parallel.tensor.modules import see_own_heads
from meshtrain.parallel.tensor.rules import TensorRules
from meshtrain.parallel.tensor.style_row import StyleRow
from meshtrain.parallel.tensor.styles import STYLES

WAYS = 2
# Norms of transformers compute in float32.
CLOSE = 1e-5


@dataclass
class _Run:
    """What modules received and returned in a run of the whole model, by name, call by call."""

    received: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    returned: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    results: list[Tensor] = field(default_factory=list)


class _DiffersError(Exception):
    """Ends a run in which a module did not compute its part."""


@torch.no_grad()
def where_parts_differ(
    model: PreTrainedModel, inputs: Mapping[str, Any], rules: TensorRules, tp: int = WAYS
) -> str | None:
    """Return the module that processes would not compute as one does; None if there is none.

    Args:
        model: unfused, with values; it is not changed.
        inputs: of the model.
        rules: of the model.
        tp: number of processes.
    """
    cut = {
        name: STYLES[style] for name, style in rules.styles.items() if STYLES[style].kind in ("projection", "experts")
    }
    whole = _run_whole(model, inputs, cut)
    sums: dict[str, list[list[Tensor]]] = defaultdict(list)
    for rank in range(tp):
        copied = copy.deepcopy(model)
        results: dict[str, list[Tensor]] = defaultdict(list)
        _become_rank(copied, rank, tp, rules, whole, results)
        try:
            found = tensors_in(copied(**inputs, use_cache=False))
            _compare("the model", found, whole.results)
        except _DiffersError as error:
            return str(error)
        except MISFITS as error:
            return f"{type(model).__name__} ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
        for name, tensors in results.items():
            sums[name].append(tensors)
    for name, parts in sums.items():
        for wanted, *of_ranks in zip(whole.returned[name], *parts, strict=True):
            if not _is_close(sum(of_ranks), wanted):
                return name
    return None


def _run_whole(model: PreTrainedModel, inputs: Mapping[str, Any], cut: Mapping[str, StyleRow]) -> _Run:
    run = _Run()

    def note(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        run.received[name].append(tensors_in((args, kwargs))[0].clone())
        run.returned[name].append(tensors_in(output)[0].clone())

    with ExitStack() as stack:
        for name in cut:
            hook = model.get_submodule(name).register_forward_hook(partial(note, name), with_kwargs=True)
            stack.callback(hook.remove)
        run.results = tensors_in(model(**inputs, use_cache=False))
    return run


def _become_rank(
    model: PreTrainedModel, rank: int, tp: int, rules: TensorRules, whole: _Run, results: dict[str, list[Tensor]]
) -> None:
    """Let a model compute as process `rank` of `tp`, except that no projection computes anything.

    Args:
        results: receives the partial results of experts, by name.
    """
    modules = dict(model.named_modules())
    for name, style in rules.styles.items():
        row, module = STYLES[style], modules[name]
        if row.kind == "projection":
            calls = zip(whole.received[name], whole.returned[name], strict=True)
            slices = local_slices(module, row, heads_of(model.config), rank, tp)
            set_forward(module, partial(_replay, name, calls, *slices))
        elif row.has_parameter_rules:
            take_own_parameters(name, module, rules.sharded_dims, rank, tp)
            if row.kind == "experts":
                if rank > 0:
                    drop_full_biases(name, module, rules.sharded_dims)
                set_forward(module, partial(_collect, module.forward, iter(whole.returned[name]), results[name]))
        elif row.own_heads:
            see_own_heads(module, rank, tp, uneven_heads(model.config, tp))
    apply_local_heads(model, rules, rank=rank, tp=tp)


def _replay(
    name: str,
    calls: Iterator[tuple[Tensor, Tensor]],
    inputs: Sequence[slice],
    outputs: Sequence[slice],
    received: Tensor,
) -> Tensor:
    """Return this process's outputs of a projection, after a look at what it received."""
    wanted, returned = next(calls)
    _compare(name, [received], [_cut(wanted, inputs)])
    # A copy, because the model may change what it gets in place.
    return _cut(returned, outputs)


def _cut(tensor: Tensor, slices: Sequence[slice]) -> Tensor:
    return torch.cat([tensor[..., at] for at in slices], -1)


def _collect(
    forward: Callable[..., Any], returned: Iterator[Tensor], results: list[Tensor], *args: Any, **kwargs: Any
) -> Any:
    output = forward(*args, **kwargs)
    results.append(tensors_in(output)[0])
    whole = next(returned).clone()
    return (whole, *output[1:]) if isinstance(output, tuple) else whole


def _compare(name: str, found: list[Tensor], wanted: list[Tensor]) -> None:
    if len(found) != len(wanted) or not all(map(_is_close, found, wanted)):
        raise _DiffersError(name)


def _is_close(found: Any, wanted: Tensor) -> bool:
    same = isinstance(found, Tensor) and found.shape == wanted.shape
    return same and torch.allclose(found, wanted, rtol=CLOSE, atol=CLOSE)
