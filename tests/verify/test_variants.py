"""Flags of a configuration class that change its computation, and variants of their pairs."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import BloomConfig, LlamaConfig, StableLmConfig, Zamba2Config

from meshtrain import cli
from meshtrain.errors import ModelError
from meshtrain.models.tiny import default_config
from meshtrain.verify import classes
from meshtrain.verify.classes import prove_experts
from meshtrain.verify.record import record_of, uncovered_flags
from meshtrain.verify.variants import Flags, attention_heads, candidates, cover_pairs, find_flags


def test_variants_cover_each_pair_of_values() -> None:
    values = {"a": (0, 1, 2), "b": (False, True), "c": (False, True), "d": (None, True, False)}
    variants, impossible = cover_pairs(values, lambda values: True)
    assert not impossible
    assert variants[0] == {}
    assert len(variants) < 12
    defaults = {name: found[0] for name, found in values.items()}
    whole = [{**defaults, **variant} for variant in variants]
    for one, other in itertools.combinations(values, 2):
        for pair in itertools.product(values[one], values[other]):
            assert any((variant[one], variant[other]) == pair for variant in whole), (one, other, pair)


def test_impossible_values_do_not_hide_other_pairs() -> None:
    def is_possible(values: Mapping[str, Any]) -> bool:
        return values.get("a") != 2 and not (values.get("a") == 1 and values.get("b"))

    values = {"a": (0, 1, 2), "b": (False, True), "c": (False, True)}
    variants, impossible = cover_pairs(values, is_possible)
    assert impossible == [{"a": 2}, {"a": 1, "b": True}]
    assert all(map(is_possible, variants))
    for pair in ({"a": 1, "c": True}, {"b": True, "c": True}):
        assert any(pair.items() <= variant.items() for variant in variants), pair


@pytest.mark.parametrize(
    ("model_type", "flags"),
    [
        # Neither of the first two has an effect alone.
        ("bloom", {"slow_but_exact", "pretraining_tp", "apply_residual_connection_post_layernorm"}),
        ("stablelm", {"qk_layernorm", "use_qkv_bias", "use_parallel_residual", "num_key_value_heads"}),
    ],
)
def test_flags_that_change_the_computation_are_found(model_type: str, flags: set[str]) -> None:
    assert {*find_flags(model_type).values} == flags | {"tie_word_embeddings"}


def test_flag_without_effect_is_silent() -> None:
    found = find_flags("llama")
    assert found.silent == ("pretraining_tp",)
    assert found.values["num_key_value_heads"] == (32, 1, 8)


def test_layers_may_have_different_numbers_of_heads() -> None:
    assert attention_heads(default_config("gpt2")) == 12
    assert "num_key_value_heads" in find_flags("dots3_note_text").values


def test_flags_of_a_block_that_layers_share_are_found() -> None:
    # They show only where two layers share one.
    assert "num_mem_blocks" in find_flags("zamba2").values
    assert uncovered_flags(Zamba2Config(num_mem_blocks=2)) == []


def test_flags_of_every_kind_of_layer_are_found() -> None:
    # The first layer with attention is the fifth.
    assert "num_key_value_heads" in find_flags("jamba").values


def test_flags_that_matter_beside_others_only_are_found() -> None:
    # It is read where `is_moe` holds.
    assert "norm_topk_prob" in find_flags("doge").values


def test_flags_of_a_type_without_a_tiny_copy_are_not_searched() -> None:
    with pytest.raises(ModelError, match="transformers cannot build a gemma4_unified_text model"):
        find_flags("gemma4_unified_assistant")
    variants = classes.prove_variants("gemma4_unified_assistant", pretrained=False)
    assert str(variants).startswith("refused: transformers cannot build a gemma4_unified_text model")
    assert not variants.record


def test_flags_of_a_model_inside_another_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes, "_try", lambda *arguments, **options: "proven")
    monkeypatch.setattr(classes, "_drop", lambda config: "proven")
    verdict = classes._verdict("emu3", only_defaults=False)
    assert (verdict.abilities["tensor"], verdict.variants) == ("proven", None)


def test_uncovered_flags_are_found() -> None:
    assert uncovered_flags(LlamaConfig(num_key_value_heads=4, tie_word_embeddings=True)) == []
    # The class does not read this flag.
    assert uncovered_flags(LlamaConfig(use_logn_attention=True)) == []
    assert uncovered_flags(StableLmConfig(qk_layernorm=True)) == []
    assert uncovered_flags(BloomConfig(pretraining_tp=2)) == []
    assert uncovered_flags(BloomConfig(slow_but_exact=True)) == []
    # Each is proven, but not both together.
    both = ["pretraining_tp = 2", "slow_but_exact = True"]
    assert uncovered_flags(BloomConfig(pretraining_tp=2, slow_but_exact=True)) == both


def test_key_value_heads_are_recorded_as_one_some_or_all() -> None:
    flags = Flags({"num_key_value_heads": (32, 1, 8), "bias": (False, True)}, ("silent",))
    proven = [{}, {"num_key_value_heads": 8, "bias": True}]
    assert record_of(flags, proven, 32) == {
        "proven": {"num_key_value_heads": ["all", "some"], "bias": [False, True]},
        "unproven": [{"num_key_value_heads": "all", "bias": True}, {"num_key_value_heads": "some", "bias": False}],
        "silent": ["silent"],
    }


def test_indivisible_heads_are_recorded_as_one_or_all() -> None:
    assert candidates(LlamaConfig(hidden_size=48, num_attention_heads=6))["num_key_value_heads"] == (6, 1)


def test_variants_are_in_the_table(tmp_path: Path) -> None:
    table = tmp_path / "coverage.md"
    assert cli._exit_code(["verify", "--models", "--type", "gptj", "--table", str(table)]) == 0
    row = table.read_text().splitlines()[-1]
    context = (
        "refused: mesh.cp = 2: GPTJForCausalLM does not compute attention through the interface of transformers, so "
        "the tokens of a part would see that part only; use cp = 1"
    )
    columns = [
        "gptj",
        "GPTJForCausalLM",
        *["proven"] * 3,
        context,
        "has no stacked experts",
        "proven",
        "2 of 2 variants of tie_word_embeddings are proven",
    ]
    assert row == f"| {' | '.join(columns)} |"
    assert (tmp_path / "variants.json").exists()


def test_experts_of_a_type_that_cannot_be_built_are_refused() -> None:
    # Its configuration is that of a part that never runs alone.
    config = default_config("gemma4_unified_assistant")
    assert prove_experts(config).startswith("refused: transformers cannot build a gemma4_unified_text model from this")
