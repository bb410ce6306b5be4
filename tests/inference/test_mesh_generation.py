"""A mesh generates the same tokens as the stock model in one process."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import DynamicCache, GenerationConfig

from meshtrain.errors import DataError, ModelError, UserError
from meshtrain.inference.generation import generate_on_mesh
from tests.inference.texts import (
    FAMILIES,
    MODES,
    NEW_TOKENS,
    PROMPT,
    MeshModel,
    Text,
    build,
    cases,
    mesh_texts,
    prompts,
    stock_model,
    stock_texts,
)
from tests.parallel.families import Float64
from tests.ranks import run_on_ranks

CACHED = [PROMPT] + [1] * (NEW_TOKENS - 1)


@functools.cache
def stock() -> dict[tuple[str, str], Text]:
    """Generate with the stock models, once per session."""
    return run_on_ranks(1, stock_texts, list(FAMILIES))[0]


def prove(*wanted: MeshModel, modes: tuple[str, ...] = tuple(MODES)) -> None:
    for answers in run_on_ranks(math.prod(wanted[0].mesh), mesh_texts, list(wanted), modes):
        for case, texts in zip(wanted, answers, strict=True):
            assert texts == {mode: stock()[case.family, mode] for mode in modes}, case


def test_stock_texts_differ_enough_to_reveal_errors() -> None:
    """Check that texts have many tokens, differ by mode, end early, and use the cache."""
    for family in FAMILIES:
        texts = {mode: stock()[family, mode] for mode in MODES}
        new = {mode: [row[PROMPT:] for row in text.tokens] for mode, text in texts.items()}
        assert all(len({token for row in rows for token in row}) >= 7 for rows in new.values()), new
        assert new["greedy"] != new["beams"] != new["sampling"] != new["greedy"]
        assert texts["greedy"].widths == CACHED[: len(texts["greedy"].widths)]
        assert texts["no cache"].widths == [*range(PROMPT, PROMPT + len(texts["no cache"].widths))]
    assert any(row[-1] == 0 for text in stock().values() for row in text.tokens)


def test_tensor_parallel_models_generate_the_stock_text() -> None:
    prove(*cases((1, 1, 1, 2)))


def test_pipelines_generate_the_stock_text() -> None:
    prove(*cases((2, 1, 1, 1)))


def test_pipelines_of_tensor_parallel_stages_generate_the_stock_text() -> None:
    prove(*cases((2, 1, 1, 2), ("gpt2", "llama", "qwen3", "mixtral", "gemma2")), modes=("greedy", "sampling", "beams"))


def test_several_stages_per_process_generate_the_stock_text() -> None:
    in_v = {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}
    in_rounds = {"schedule": "Interleaved1F1B", "stages_per_rank": 2}
    in_both = (
        *cases((2, 1, 1, 1), ("llama", "gemma2"), pipeline=in_v),
        *cases((2, 1, 1, 1), ("gpt2",), pipeline=in_rounds),
    )
    prove(*in_both, modes=("greedy", "beams"))


def test_sequence_parallel_models_generate_the_stock_text() -> None:
    is_split = {"sequence_parallel": True}
    prove(*cases((1, 1, 1, 2), ("gpt2", "mixtral"), tensor=is_split), modes=("greedy", "no cache"))
    prove(*cases((2, 1, 1, 2), ("llama", "mixtral"), tensor=is_split), modes=("beams",))


def train_on_seven_tokens(case: MeshModel) -> tuple[str, tuple[int, ...]]:
    model = build(case).stages[0].model
    ids = torch.full((1, 7), 5)
    with Float64(), pytest.raises(DataError) as refused:
        model(input_ids=ids)
    with Float64(), torch.no_grad():
        return str(refused.value), tuple(model(input_ids=ids).logits.shape)


def test_length_that_tp_does_not_divide_is_refused_with_gradients_only() -> None:
    case = MeshModel("llama", (1, 1, 1, 2), tensor={"sequence_parallel": True})
    expected = (
        "tensor.sequence_parallel splits the sequence over tp = 2, which does not divide its 7 tokens; pad the batch "
        "(pad_to_multiple_of = 2 of a tokenizer), or set tensor.sequence_parallel = false"
    )
    assert run_on_ranks(2, train_on_seven_tokens, case) == [(expected, (1, 7, 61))] * 2


def test_sharded_models_generate_the_stock_text() -> None:
    prove(*cases((1, 1, 2, 1), ("gpt2", "mixtral", "gemma2")), modes=("sampling", "beams"))
    prove(*cases((2, 1, 2, 1), ("gemma2",)), modes=("beams",))


def test_compiled_layers_generate_the_stock_text() -> None:
    prove(
        MeshModel("llama", (1, 1, 1, 2), compiled=True),
        MeshModel("gpt2", (2, 1, 1, 1), compiled=True),
        modes=("greedy",),
    )


PLAIN: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}


def generate_on_data_ranks(case: MeshModel) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Generate on two data ranks from different prompts, one of which ends early; change weights.

    Returns:
        The texts of the mesh and of the stock model, before and after the change.
    """
    pipeline, stock, rank = build(case), stock_model(case.family), dist.get_rank()
    given = {name: value[: 2 - rank] for name, value in prompts(seed=rank).items()}
    pairs = []
    with Float64():
        free = stock.generate(**given, **PLAIN, eos_token_id=None)
        options = {**given, **PLAIN, "eos_token_id": int(free[0, PROMPT + 1]) if rank else None}
        for _ in range(2):
            pairs.append((generate_on_mesh(pipeline, **options).tolist(), stock.generate(**options).tolist()))
            with torch.no_grad():
                for parameter in (*stock.parameters(), *(p for _, p in pipeline.named_parameters())):
                    parameter.mul_(0.8)
    return pairs


def test_data_ranks_generate_from_their_own_prompts_with_current_weights() -> None:
    first, second = run_on_ranks(2, generate_on_data_ranks, MeshModel("llama", (1, 1, 2, 1)))
    for found, expected in (*first, *second):
        assert found == expected
    assert len(first[0][0][0]) == PROMPT + NEW_TOKENS
    assert len(second[0][0][0]) == PROMPT + 2
    assert first[0] != first[1]


def generate_with_options(generate: Callable[..., Any]) -> list[Any]:
    """Generate with other kinds of caches, continue from a full one, and return the logits."""
    given = prompts()
    written = [generate(**given, **PLAIN, **options) for options in CACHES]
    for cache in (DynamicCache(config=FAMILIES["gemma2"].hf_config()), DynamicCache()):
        once = generate(**given, past_key_values=cache, **PLAIN)
        mask = torch.cat([given["attention_mask"], torch.ones_like(once[:, PROMPT:])], dim=1)
        written += [once, generate(once, attention_mask=mask, past_key_values=cache, **PLAIN)]
    detailed = generate(**given, **PLAIN, return_dict_in_generate=True, output_logits=True)
    return [tokens.tolist() for tokens in written] + [torch.stack(detailed.logits)]


CACHES: tuple[dict[str, Any], ...] = ({"cache_implementation": "static"}, {"prefill_chunk_size": 4})


def compare_options(case: MeshModel) -> float:
    """Return the error of the logits, if all tokens are equal."""
    with Float64():
        *found, logits = generate_with_options(functools.partial(generate_on_mesh, build(case)))
        *expected, wanted = generate_with_options(stock_model(case.family).generate)
    assert found == expected
    assert len(found[-1][0]) == PROMPT + 2 * NEW_TOKENS
    return (logits - wanted).abs().max().item() / wanted.abs().max().item()


@pytest.mark.parametrize("mesh", [(1, 1, 1, 2), (2, 1, 1, 1)])
def test_other_options_of_generate_match_the_stock_model(mesh: tuple[int, int, int, int]) -> None:
    in_v = {"schedule": "ZBVZeroBubble", "stages_per_rank": 2} if mesh[0] > 1 else {}
    errors = run_on_ranks(2, compare_options, MeshModel("gemma2", mesh, pipeline=in_v))
    assert max(errors) <= 1e-12


Question = tuple[MeshModel, list[dict[str, Any]]]
"""A model, and what each rank asks of it in its own way."""


def ask(questions: list[Question]) -> list[str]:
    """Generate with unsupported arguments, and return the messages."""
    return [_ask(*question) for question in questions]


def _ask(case: MeshModel, own: list[dict[str, Any]]) -> str:
    pipeline = build(case)
    options = {**prompts(), **PLAIN, **own[dist.get_rank() % len(own)]}
    with Float64(), pytest.raises((ModelError, UserError)) as refused:
        generate_on_mesh(pipeline, **options)
    return str(refused.value)


def test_different_arguments_on_ranks_of_one_model_are_refused() -> None:
    other = prompts()["inputs"].roll(1)
    mine = {"inputs": other, "num_beams": 2, "streamer": object()}
    for (message,) in run_on_ranks(2, ask, [(MeshModel("llama", (1, 1, 1, 2)), [{}, mine])]):
        assert message == (
            "generate: rank 0 and rank 1 hold one model together, but received different inputs, num_beams; pass the "
            "same to all of them"
        )
    answers = run_on_ranks(4, ask, [(MeshModel("llama", (2, 1, 1, 2)), [{}, {}, {}, {"max_new_tokens": 3}])])
    assert "rank 0 and rank 3 hold one model together, but received different max_new_tokens" in answers[2][0]


@pytest.mark.parametrize("mesh", [(1, 1, 1, 2), (2, 1, 1, 1)])
def test_max_time_and_prompts_without_tokens_are_refused(mesh: tuple[int, int, int, int]) -> None:
    case = MeshModel("llama", mesh)
    nothing, other = torch.zeros(2, 0, dtype=torch.int64), torch.full((2, 1), 61)
    timed = [{"max_time": 1.0}], [{"generation_config": GenerationConfig(max_time=1.0)}]
    questions = [
        *((case, own) for own in timed),
        (case, [{"inputs": nothing}]),
        (case, [{"inputs": other}]),
    ]
    for *clocks, empty, unknown in run_on_ranks(2, ask, questions):
        assert clocks == [
            "generate: with max_time every process would stop by its own clock, while the others of its model wait "
            "for it; leave it out, and set max_new_tokens"
        ] * len(timed)
        assert unknown == (
            "input_ids has tokens from 61 to 61, but the model knows 0 to 60; use the tokenizer of the model, "
            "or add rows for new tokens (model.resize_token_embeddings) before meshtrain.parallelize"
        )
        assert empty == "generate: the prompts (2, 0) have no tokens; begin them with bos_token_id"


def test_outputs_and_caches_that_a_pipeline_lacks_are_refused() -> None:
    mesh = (2, 1, 1, 1)
    whole = [
        (MeshModel("llama", mesh), [{name: True, "return_dict_in_generate": True}])
        for name in ("output_attentions", "output_hidden_states")
    ]
    answers = run_on_ranks(2, ask, [*whole, (MeshModel("mamba", mesh), [{}]), (MeshModel("lfm2", mesh), [{}])])
    assert answers[0] == answers[1]
    attentions, hidden, mamba, lfm2 = answers[0]
    message = (
        "is not available in a pipeline, of which every process holds a part; leave it out, or use a mesh with pp = 1"
    )
    assert (attentions, hidden) == (
        f"generate: output_attentions {message}",
        f"generate: output_hidden_states {message}",
    )
    assert mamba.startswith("generate: MambaForCausalLM keeps a cache of its own, and only keys and values (of all ")
    assert lfm2.startswith("generate: Lfm2ForCausalLM keeps LinearAttentionLayer, and only keys and values (of all ")
    assert lfm2.endswith("can be kept on several stages; pass use_cache=False, or use a mesh with pp = 1")


def test_models_with_other_caches_generate_without_a_cache() -> None:
    others = ["mamba", "lfm2"]
    stock = run_on_ranks(1, stock_texts, others, ["no cache"])[0]
    for answers in run_on_ranks(2, mesh_texts, cases((2, 1, 1, 1), others), ["no cache"]):
        assert [texts["no cache"] for texts in answers] == [*stock.values()]
