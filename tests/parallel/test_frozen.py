"""Frozen parameters on every axis and schedule, beside the stock model in one process."""

import functools
import re

import pytest
from transformers import PreTrainedModel

from meshtrain.parallel import replicas
from meshtrain.verify.case import Trace
from meshtrain.verify.parallel import train_pipeline
from tests.casts import lift_float32_casts
from tests.parity import Case, assert_equal_to_reference, batches, build, fill, reference, stock_weights
from tests.ranks import RankError, run_on_ranks

# Patterns of the parameters that train, by name.
TRAINED = {
    "gpt2-tied": {
        "second half": r"transformer\.(h\.[23]|ln_f)",
        "half of a projection": r"transformer\.h\.\d\.(attn\.c_attn\.weight|mlp\.c_fc\.bias)",
    },
    "llama-untied": {
        "head": r"lm_head",
        "all but the embedding": r"(?!model\.embed)",
        "second half": r"model\.(layers\.[23]|norm)|lm_head",
        "first half": r"model\.(embed|layers\.[01])",
        "one norm": r"model\.layers\.2\.input_layernorm",
    },
}
ALL = (*TRAINED["gpt2-tied"], *TRAINED["llama-untied"])
# The patterns used on each mesh; in a pipeline, some stages have nothing to train.
CASES: dict[str, list[tuple[Case, tuple[str, ...]]]] = {
    "pp": [(Case("gpt2-tied", (2, 1, 1, 1)), ALL), (Case("llama-untied", (2, 1, 1, 1)), ALL)],
    "tp": [
        (Case("gpt2-tied", (1, 1, 1, 2)), ("half of a projection",)),
        (Case("llama-untied", (1, 1, 1, 2), sequence_parallel=True), ("all but the embedding", "one norm")),
    ],
    "dp_shard": [
        (Case("gpt2-tied", (1, 1, 2, 1)), ("half of a projection",)),
        (Case("llama-untied", (1, 1, 2, 1)), ("second half", "one norm")),
    ],
    "dp_replicate": [(Case("llama-untied", (1, 2, 1, 1)), ("second half",))],
    "interleaved": [(Case("gpt2-tied", (2, 1, 1, 1), "Interleaved1F1B", 2), ("second half",))],
    "zero bubble": [
        (Case("gpt2-tied", (2, 1, 1, 1), "ZBVZeroBubble", 2), ("second half",)),
        (Case("llama-untied", (2, 1, 1, 1), "ZBVZeroBubble", 2), ("first half", "one norm")),
    ],
    "several": [
        (Case("gpt2-tied", (2, 1, 1, 2), sequence_parallel=True), ("half of a projection",)),
        (Case("llama-untied", (2, 1, 2, 1), recompute=1), ("first half",)),
    ],
}
# Several cases share one start of ranks, which costs as much as one case.
STARTS = {2: [kind for kind in CASES if kind != "several"], 4: ["several"]}


def freeze(model: PreTrainedModel, trained: str) -> None:
    """Freeze the parameters that do not match a pattern."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.match(trained, name) is not None)


def train(kinds: list[str]) -> list[dict[str, Trace]]:
    lift_float32_casts()
    return [
        {what: train_one(case, trained) for what, trained in TRAINED[case.model].items() if what in tried}
        for kind in kinds
        for case, tried in CASES[kind]
    ]


def train_one(case: Case, trained: str) -> Trace:
    pipeline = build(case, change=functools.partial(freeze, trained=trained))
    fill(pipeline, stock_weights(case.model))
    return train_pipeline(pipeline, batches())


def train_stock() -> dict[str, dict[str, Trace]]:
    return {
        model: {
            what: reference(model, "joined", functools.partial(freeze, trained=trained))
            for what, trained in patterns.items()
        }
        for model, patterns in TRAINED.items()
    }


@functools.cache
def stock() -> dict[str, dict[str, Trace]]:
    return run_on_ranks(1, train_stock)[0]


@pytest.mark.parametrize("world_size", STARTS)
def test_frozen_parameters_train_as_in_one_process(world_size: int) -> None:
    cases = [case for kind in STARTS[world_size] for case, _ in CASES[kind]]
    answers = run_on_ranks(world_size, train, STARTS[world_size])
    for case, *ranks in zip(cases, *answers, strict=True):
        assert ranks[0], "a pattern is tried"
        for what in ranks[0]:
            expected = stock()[case.model][what]
            assert expected.gradients[0], "something trains"
            assert_equal_to_reference([traces[what] for traces in ranks], expected)


def train_nothing(case: Case) -> None:
    train_one(case, "nothing")


@pytest.mark.parametrize("mesh", [(1, 1, 1, 1), (2, 1, 1, 1)], ids=str)
def test_model_without_trained_parameters_is_refused(mesh: tuple[int, int, int, int]) -> None:
    with pytest.raises(RankError, match="every parameter is frozen, so there is nothing to train"):
        run_on_ranks(mesh[0] * mesh[3], train_nothing, Case("llama-untied", mesh))


def unfreeze(case: Case) -> tuple[Trace, Trace]:
    """Train a model unfrozen after `parallelize`, and one with these parameters from the start."""
    replicas.LARGE = 1
    lift_float32_casts()
    half = TRAINED[case.model]["second half"]
    late = build(case, change=functools.partial(freeze, trained=TRAINED[case.model]["first half"]))
    for name, parameter in late.named_parameters():
        parameter.requires_grad_(re.match(half, name) is not None)
    fill(late, stock_weights(case.model))
    return train_pipeline(late, batches()), train_one(case, half)


def test_parameters_can_be_unfrozen_later() -> None:
    """Replicas reduce gradients of parameters that train now, not of those trained at first."""
    for late, early in run_on_ranks(2, unfreeze, Case("llama-untied", (1, 2, 1, 1))):
        assert_equal_to_reference([late], early)
