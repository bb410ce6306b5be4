"""Tied embeddings with both ends on different stages act as one weight."""

import pytest
import torch
from torch import Tensor, nn

from meshtrain.models.layout import local_tensor
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.tied import Tie, TiedCopies
from meshtrain.verify.parallel import build_step_context
from tests.parallel.steps import moments, start, take_step
from tests.parity import Case, batches
from tests.ranks import run_on_ranks

CASES = [
    Case("gpt2-odd", (2, 1, 1, 2)),
    Case("qwen3", (2, 1, 1, 2), "Interleaved1F1B", 2, sequence_parallel=True),
    Case("llama-tied", (2, 1, 2, 1), reshard="always"),
    Case("llama-tied", (2, 2, 1, 1), layers=(4, 0)),
    Case("gpt2-tied", (4, 1, 1, 1)),
    Case("llama-tied", (1, 1, 2, 2)),
]
Ends = dict[str, Tensor]


def train(case: Case) -> tuple[str | None, int, Ends]:
    """Return the end on this process, the number of copies, and its value, gradient and moments."""
    pipeline = start(case)
    context = build_step_context(pipeline)
    for step, batch in enumerate(batches()):
        take_step(context, step, batch)
    canonical = pipeline.canonical_names()
    (source,) = set(pipeline.stages[0].model.all_tied_weights_keys.values())
    for name, parameter in pipeline.named_parameters():
        if canonical[name] == source:
            tensors = {"value": parameter.detach(), "gradient": parameter.grad, **moments(context.optimizer, parameter)}
            ends = {kind: local_tensor(tensor).clone() for kind, tensor in tensors.items()}
            return ("far" if name != source else "near"), num_copies(pipeline), ends
    return None, num_copies(pipeline), {}


def num_copies(pipeline: Pipeline) -> int:
    return len([*pipeline.tied_copies.parameters()])


def train_all() -> list[tuple[str | None, int, Ends]]:
    return [train(case) for case in CASES]


def test_both_ends_of_a_tied_weight_stay_bit_equal() -> None:
    for case, ranks in zip(CASES, zip(*run_on_ranks(4, train_all), strict=True), strict=True):
        near, far = ([ends for end, _, ends in ranks if end == wanted] for wanted in ("near", "far"))
        if case.mesh[0] == 1:
            assert (len(near), len(far)) == (4, 0)
            assert {copies for _, copies, _ in ranks} == {0}, "one stage holds one parameter"
            continue
        assert len(near) == len(far) == 4 // case.mesh[0]
        for one, other in zip(near, far, strict=True):
            assert one.keys() == {"value", "gradient", "exp_avg", "exp_avg_sq"}
            for kind in one:
                assert torch.equal(one[kind], other[kind]), (case, kind)
            assert bool(one["gradient"].any())
        assert [copies for _, copies, _ in ranks] == [int(end is not None) for end, _, _ in ranks]


def test_reduction_without_ties_does_nothing() -> None:
    TiedCopies().reduce_gradients()


@pytest.mark.parametrize("copies", [1, 2])
def test_tied_weight_without_a_gradient_is_an_error(copies: int) -> None:
    weights = tuple(nn.Parameter(torch.zeros(2)) for _ in range(copies))
    with pytest.raises(AssertionError, match="a parameter has no gradient"):
        TiedCopies([Tie(weights, weights[0], None)]).reduce_gradients()


def test_gradients_of_all_copies_on_one_process_are_added() -> None:
    copies = tuple(nn.Parameter(torch.zeros(2)) for _ in range(3))
    for copy, gradient in zip(copies, ([1.0, 2.0], [3.0, 5.0], [10.0, 20.0]), strict=True):
        copy.grad = torch.tensor(gradient)
    TiedCopies([Tie(copies, copies[0], None)]).reduce_gradients()
    gradients = [copy.grad for copy in copies if copy.grad is not None]
    assert [gradient.tolist() for gradient in gradients] == [[14.0, 27.0]] * 3
    assert len({gradient.data_ptr() for gradient in gradients}) == 3


def test_copies_are_frozen_like_their_original() -> None:
    original, copy, other = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    ties = TiedCopies([Tie((original, copy), original, None), Tie((other,), None, None)])
    original.requires_grad_(requires_grad=False)
    assert ties.trained_originals() == [0, 0]
    ties.freeze_copies([0, 1])
    assert [it.requires_grad for it in (original, copy, other)] == [False, False, True]
