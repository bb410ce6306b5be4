"""Classifiers under tensor parallelism train like the stock models."""

import math
from typing import Any

import pytest

from meshtrain.errors import PlanError
from tests.api.classifiers import Classifier, errors_on
from tests.ranks import RankError, run_on_ranks

FAMILIES = ("gpt2", "llama", "qwen3")
PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")


def prove(mesh: dict[str, int], classifiers: list[Classifier]) -> None:
    for answers in run_on_ranks(math.prod(mesh.values()), errors_on, mesh, classifiers):
        for classifier, errors in zip(classifiers, answers, strict=True):
            wrong = {name: error for name, error in errors.items() if not error <= 1e-12}
            assert not wrong, (classifier, wrong)
            assert len(errors) > 20


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_sequence_classifiers_train_like_the_stock_models(mesh: dict[str, int]) -> None:
    prove(mesh, [Classifier(family, problem) for family in FAMILIES for problem in PROBLEMS])


def test_other_heads_and_families_train_like_the_stock_models() -> None:
    others = [*(Classifier(family, None, "token") for family in FAMILIES), Classifier("gpt2", None, "question")]
    # These rules are derived from the model's own plan and from that of a family.
    others += [Classifier("mistral"), Classifier("opt"), Classifier("mixtral")]
    prove({"tp": 2}, others)
    is_split: dict[str, Any] = {"sequence_parallel": True}
    prove({"tp": 2}, [Classifier("gpt2", tensor=is_split), Classifier("llama", tensor=is_split)])


def test_classifier_over_pp_is_refused() -> None:
    with pytest.raises(RankError) as failed:
        run_on_ranks(2, errors_on, {"pp": 2}, [Classifier("llama")])
    assert isinstance(failed.value.original, PlanError)
    assert str(failed.value.original) == (
        "mesh.pp = 2, but LlamaForSequenceClassification has no language modeling head, and only causal language "
        "models can be cut into stages; use pp = 1"
    )
