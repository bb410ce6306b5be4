"""Count what recomputation keeps and what it computes again."""

import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.parity import Case, batches, build, fill, smallest_part, stock_weights
from tests.ranks import run_on_ranks

NONE = Case("llama-untied", (1, 1, 1, 1))
FULL = replace(NONE, recompute=1)
SELECTIVE = replace(FULL, recompute_mode="selective")
CASES = (NONE, FULL, SELECTIVE, replace(SELECTIVE, recompute=2))
LAYERS, MATRICES = 4, 7


class Watch(TorchDispatchMode):
    """Counts computed operators, and tracks the memory of every result while it is held."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.storages: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket.__name__] += 1
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.storages += [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
        return result

    def held_bytes(self) -> int:
        """Return the bytes that are still held."""
        alive = {storage.data_ptr(): storage.nbytes() for ref in self.storages if (storage := ref()) is not None}
        return sum(alive.values())


def watch(case: Case) -> tuple[int, Counter[str]]:
    """Return the bytes kept for the backward pass, and the operators of the backward pass."""
    pipeline = build(case)
    fill(pipeline, stock_weights(case.model))
    batch = smallest_part(pipeline, batches()[0])
    with Watch() as forward:
        loss = pipeline.stages[0].compute((), input_ids=batch["input_ids"]).square().sum()
        held = forward.held_bytes()
    with Watch() as backward:
        loss.backward()
    return held, backward.calls


def watch_all(cases: tuple[Case, ...]) -> list[tuple[int, Counter[str]]]:
    return [watch(case) for case in cases]


def products(calls: Counter[str]) -> int:
    return calls["mm"] + calls["addmm"] + calls["bmm"]


def attentions(calls: Counter[str]) -> int:
    return calls["_scaled_dot_product_flash_attention_for_cpu"]


def test_selective_keeps_products_and_attention_and_recomputes_the_rest() -> None:
    ((none, full, selective, every_second),) = run_on_ranks(1, watch_all, CASES)
    assert products(full[1]) - products(none[1]) == LAYERS * MATRICES - LAYERS  # the last product is not needed
    assert attentions(full[1]) == LAYERS
    for _, calls in (selective, every_second):
        assert products(calls) == products(none[1])
        assert attentions(calls) == attentions(none[1]) == 0
    again = [calls["silu"] for _, calls in (none, full, selective, every_second)]
    assert again == [0, LAYERS, LAYERS, LAYERS // 2]
    # Bytes held between forward and backward.
    assert full[0] < selective[0] < every_second[0] < none[0]


def test_selective_keeps_results_of_collectives() -> None:
    cases = tuple(replace(case, mesh=(1, 1, 1, 2), sequence_parallel=True) for case in CASES[:3])
    for none, full, selective in run_on_ranks(2, watch_all, cases):
        names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
        sent = [sum(calls[name] for name in names) for _, calls in (none, full, selective)]
        assert sent[0] == sent[2] < sent[1]
        assert products(selective[1]) == products(none[1])
        # Not less than without recomputation: here the partial sums, also kept, exceed the savings.
        assert full[0] < selective[0]


def backward_of_compiled(cases: list[Case]) -> list[Counter[str]]:
    found = []
    for case in cases:
        pipeline = build(case)
        fill(pipeline, stock_weights(case.model))
        loss = pipeline.stages[0].compute((), input_ids=batches()[0]["input_ids"]).square().sum()
        with Watch() as backward:
            loss.backward()
        found.append(backward.calls)
    return found


def test_selective_keeps_the_same_results_in_compiled_layers() -> None:
    ((none, selective),) = run_on_ranks(1, backward_of_compiled, [NONE, replace(SELECTIVE, compiled=True)])
    assert products(selective) == products(none)
    assert attentions(selective) == 0
    assert selective["silu"] + selective["sigmoid"] >= LAYERS
