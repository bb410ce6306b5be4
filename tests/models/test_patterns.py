"""Module patterns: their matches, and the messages without a match."""

import pytest
from torch import nn

from meshtrain.errors import PlanError
from meshtrain.models.patterns import as_pattern, match_modules, match_names

NAMES = ["model.embed", "model.layers.0.mlp", "model.layers.0.mlp.up", "model.layers.12.mlp.up", "model.norm"]


def problems(rules: dict[str, str]) -> tuple[str, ...]:
    with pytest.raises(PlanError) as caught:
        match_names(NAMES, rules, "tensor.styles")
    return caught.value.lines


def test_star_matches_one_number() -> None:
    found = match_names(NAMES, {"model.layers.*.mlp.up": "up", "model.norm": "norm"}, "tensor.styles")
    assert found == {"model.layers.0.mlp.up": "up", "model.layers.12.mlp.up": "up", "model.norm": "norm"}
    assert list(found) == ["model.layers.0.mlp.up", "model.layers.12.mlp.up", "model.norm"], "the order of the model"


@pytest.mark.parametrize("pattern", ["model.*.mlp.up", "model.layers.*", "model.layers.*.*.up", "model?norm", "norm"])
def test_other_names_are_not_matched(pattern: str) -> None:
    assert any("matches no module of the model" in problem for problem in problems({pattern: "x"}))


def test_unused_rule_is_named_with_the_most_similar_module() -> None:
    assert problems({"model.layers.*.mpl.up": "x", "model.nrom": "x", "zzz": "x"}) == (
        "tensor.styles: 'model.layers.*.mpl.up' matches no module of the model; the nearest is 'model.layers.*.mlp.up'",
        "tensor.styles: 'model.nrom' matches no module of the model; the nearest is 'model.norm'",
        "tensor.styles: 'zzz' matches no module of the model",
    )


def test_two_rules_on_one_module_are_refused() -> None:
    assert problems({"model.layers.*.mlp.up": "x", "model.layers.0.mlp.up": "y"}) == (
        "tensor.styles: model.layers.0.mlp.up is matched by two rules, 'model.layers.*.mlp.up' and "
        "'model.layers.0.mlp.up'; leave one",
    )


def test_modules_of_a_model_are_matched() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
    assert match_modules(model, {"layers.*": 3}, "k") == {"layers.0": 3, "layers.1": 3}
    assert match_modules(model, {}, "k") == {}


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("model.layers.12.mlp", "model.layers.*.mlp"),
        ("h.3", "h.*"),
        ("layers.1.experts.7.up", "layers.*.experts.*.up"),
        ("conv1.fc2", "conv1.fc2"),
    ],
)
def test_name_becomes_a_pattern(name: str, pattern: str) -> None:
    assert as_pattern(name) == pattern
