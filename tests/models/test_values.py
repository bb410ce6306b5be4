"""Numbers out of range in a model's configuration, which transformers accepts."""

from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshtrain.config.run import ModelConfig
from meshtrain.errors import ModelError
from meshtrain.models.build import load_hf_config
from meshtrain.models.values import value_problems

NAN, INF = float("nan"), float("inf")
PROBABILITY, EPSILON = "a probability from 0 below 1", "a number above 0, up to 0.1"


def problems_of(model_type: str, **values: Any) -> tuple[str, ...]:
    with pytest.raises(ModelError) as caught:
        load_hf_config(ModelConfig(type=model_type, config=values))
    return caught.value.lines


@pytest.mark.parametrize(
    ("model_type", "name", "value", "wanted"),
    [
        ("gpt2", "layer_norm_epsilon", NAN, "a finite number"),
        ("gpt2", "layer_norm_epsilon", 0.0, EPSILON),
        ("llama", "rms_norm_eps", -1e-5, EPSILON),
        ("gpt2", "initializer_range", INF, "a finite number"),
        ("gpt2", "initializer_range", -0.02, "a number from 0"),
        ("gpt2", "attn_pdrop", 1, PROBABILITY),
        ("gpt2", "resid_pdrop", 1.0, PROBABILITY),
        ("llama", "attention_dropout", -0.1, PROBABILITY),
        ("gpt2", "n_embd", -1, "a whole number from 1 to 1,000,000,000"),
        ("gpt2", "n_positions", -1, "a whole number from 1 to 1,000,000,000"),
        ("gpt2", "n_positions", 10**18, "a whole number from 1 to 1,000,000,000"),
        ("gpt2", "hidden_size", 0, "a whole number from 1 to 1,000,000,000"),
        ("gpt2", "n_layer", 10**9, "a whole number from 1 to 10,000"),
        ("gpt2", "layer_norm_epsilon", 0.99, EPSILON),
        ("gpt2", "initializer_range", 1e11, "a number up to 100"),
        ("gpt2", "n_inner", -4, "a whole number from 1"),
        ("gpt2", "n_inner", 0, "a whole number from 1"),
        ("gpt2", "num_labels", -3, "a whole number from 1"),
        ("gpt2", "bos_token_id", -5, "a token below vocab_size = 50,257"),
        ("gpt2", "eos_token_id", 99_999_999, "a token below vocab_size = 50,257"),
        ("glm4_moe", "partial_rotary_factor", 7.5, "a number from 0 to 1"),
        ("mixtral", "num_local_experts", 10**18, "a number up to 1,000,000,000"),
    ],
)
def test_number_out_of_range_is_refused(model_type, name, value, wanted):
    assert problems_of(model_type, **{name: value}) == (f"model.config.{name} = {value!r}; set it to {wanted}",)


@pytest.mark.parametrize("dtype", ["nosuch", 5e-324, ["a"], "manual_seed"])
def test_unknown_dtype_is_refused(dtype):
    (problem,) = problems_of("gpt2", dtype=dtype)
    assert problem == f"model.config.dtype = {dtype!r}; set it to the name of a dtype of torch, such as 'bfloat16'"
    assert load_hf_config(ModelConfig(type="gpt2", config={"dtype": "bfloat16"}))


def test_long_value_is_shortened_in_the_message():
    for name, value in {"dtype": "y" * 5000, "eos_token_id": [10**9] * 1000, "n_embd": -(10**1000)}.items():
        problem = problems_of("gpt2", **{name: value})[0]
        assert problem.startswith(f"model.config.{name} = ")
        assert len(problem) < 300


def test_experts_of_a_token_are_among_all():
    (problem,) = problems_of("glm4_moe", n_routed_experts=4)
    assert problem == "model.config.num_experts_per_tok = 8; set it to at most n_routed_experts = 4"


def test_numbers_in_tables_and_lists_are_checked():
    rope = {"rope_type": "default", "rope_theta": NAN}
    assert problems_of("llama", rope_parameters=rope) == (
        "model.config.rope_parameters.rope_theta = nan; set it to a finite number",
    )
    assert problems_of("gpt2", id2label={"a": [1, INF]}) == (
        "model.config.id2label.a = inf; set it to a finite number",
    )


def test_all_wrong_numbers_are_reported_together():
    assert len(problems_of("gpt2", n_embd=-1, attn_pdrop=2.0, layer_norm_epsilon=INF)) == 3


def test_defaults_of_all_classes_are_accepted():
    refused = []
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = AutoConfig.for_model(model_type)
        except StrictDataclassError:
            # The defaults of this class contradict each other.
            continue
        refused += [f"{model_type}: {problem}" for problem in value_problems(config, config.to_dict())]
    assert refused == []


def test_infinity_is_accepted_where_it_is_a_default():
    assert load_hf_config(ModelConfig(type="mamba2", config={"time_step_limit": [0.0, INF]})).time_step_limit[1] == INF
