"""The sizes predicted for a plan before it runs, against the tensors of real processes."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshtrain.config.plan import PrecisionPlan
from meshtrain.config.run import ModelConfig
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.account import StageShare, account, flops_around_layers, flops_per_token, messages
from tests.parity import GPT2, LLAMA, MODELS, Case, build
from tests.ranks import run_on_ranks

# The axes do not divide these sizes: 101 and 107 tokens, widths of 40 and 44.
UNEVEN = {
    "gpt2-tied": {**GPT2, "vocab_size": 101, "n_embd": 40, "n_inner": 54, "n_positions": 13},
    "llama-untied": {**LLAMA, "vocab_size": 107, "hidden_size": 44, "intermediate_size": 58, "head_dim": 6},
    "qwen3": {**LLAMA, "vocab_size": 107, "hidden_size": 44, "intermediate_size": 58, "head_dim": 6}
    | {"num_key_value_heads": 2, "tie_word_embeddings": True},
}
CASES = {
    1: [Case("gpt2-tied", (1, 1, 1, 1))],
    2: [Case("gpt2-tied", (1, 1, 1, 2)), Case("qwen3", (2, 1, 1, 1), "Interleaved1F1B", 2)],
    4: [
        Case("gpt2-tied", (1, 1, 2, 2)),
        Case("llama-untied", (1, 1, 4, 1)),
        Case("qwen3", (2, 1, 1, 2), layers=(4, 0)),
        Case("llama-untied", (1, 2, 2, 1)),
    ],
    6: [Case("gpt2-tied", (1, 1, 3, 2)), Case("llama-untied", (1, 1, 3, 2)), Case("qwen3", (2, 1, 3, 1))],
}

ROWS, LENGTH = 2, 12


@dataclass(frozen=True)
class Held:
    """The tensors of one process for one stage."""

    stage: int
    rank: int
    elements: int
    storage_bytes: int
    whole: int
    layers: tuple[int, int]
    ends: tuple[bool, bool]


def model_of(case: Case) -> ModelConfig:
    return ModelConfig(type=MODELS[case.model].type, config=UNEVEN[case.model])


def measure_held(cases: list[Case]) -> list[list[Held]]:
    held = []
    for case in cases:
        held.append([])
        for stage in build(case, model=model_of(case)).stages:
            parameters = list(stage.model.parameters())
            shards = [local_tensor(parameter.detach()) for parameter in parameters]
            held[-1].append(
                Held(
                    stage.index,
                    dist.get_rank(),
                    sum(shard.numel() for shard in shards),
                    sum(shard.numel() * shard.element_size() for shard in shards),
                    sum(parameter.numel() for parameter in parameters),
                    (stage.first_layer, stage.last_layer),
                    (stage.is_first, stage.is_last),
                )
            )
    return held


def shares_of(case: Case, **precision: Any) -> list[StageShare]:
    model = build_meta_model(load_hf_config(model_of(case)), dtype=torch.float64)
    plan = case.plan()
    plan = plan.model_copy(update={"precision": PrecisionPlan(**precision)}) if precision else plan
    return account(model, plan)


@pytest.mark.parametrize("world_size", CASES)
def test_shares_equal_the_tensors_of_real_processes(world_size: int) -> None:
    ranks = run_on_ranks(world_size, measure_held, CASES[world_size])
    for number, case in enumerate(CASES[world_size]):
        for share in shares_of(case):
            held = [item for rank in ranks for item in rank[number] if item.stage == share.stage]
            assert share.ranks == tuple(item.rank for item in held), case
            assert share.num_local_parameters == max(item.elements for item in held), case
            assert share.parameter_bytes == max(item.storage_bytes for item in held)
            assert share.gradient_bytes == share.parameter_bytes
            assert share.optimizer_bytes == 2 * share.parameter_bytes
            assert {item.whole for item in held} == {share.num_parameters}
            assert {item.layers for item in held} == {share.layers}
            assert {item.ends for item in held} == {(share.has_embedding, share.has_head)}


def test_stages_come_in_order_and_cover_the_model() -> None:
    case = Case("qwen3", (2, 1, 1, 1), "Interleaved1F1B", 2)
    shares = shares_of(case)
    assert [share.stage for share in shares] == [0, 1, 2, 3]
    assert [share.pp_rank for share in shares] == [0, 1, 0, 1]
    assert [share.layers for share in shares] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    model = build_meta_model(load_hf_config(model_of(case)), dtype=torch.float64)
    far_copy = model.lm_head.weight.numel()
    assert sum(share.num_parameters for share in shares) == model.num_parameters() + far_copy


def test_bytes_follow_the_precision_of_parameters() -> None:
    case = Case("llama-untied", (1, 1, 2, 2))
    (wide,) = shares_of(case, parameters="float32")
    (narrow,) = shares_of(case, parameters="bfloat16", compute="bfloat16")
    assert wide.num_local_parameters == narrow.num_local_parameters
    assert wide.parameter_bytes == 4 * wide.num_local_parameters
    assert narrow.parameter_bytes == 2 * narrow.num_local_parameters


def test_messages_have_the_format_of_the_computation() -> None:
    case = Case("llama-untied", (2, 1, 1, 2), sequence_parallel=True)
    model = build_meta_model(load_hf_config(model_of(case)), dtype=torch.float32)
    precision = PrecisionPlan(parameters="float32", compute="bfloat16", reduce="float32")
    (message,) = messages(model, case.plan().model_copy(update={"precision": precision}), ROWS, LENGTH)
    assert (message.stage, message.origin, message.shape) == (1, "result of model.layers.1", (ROWS, LENGTH, 44))
    assert message.num_bytes == ROWS * LENGTH // 2 * 44 * 2
    assert message.has_gradient


def test_account_leaves_the_model_unchanged() -> None:
    model = build_meta_model(load_hf_config(model_of(Case("gpt2-tied", (1, 1, 1, 1)))), dtype=torch.float64)
    before = [name for name, _ in model.named_modules()]
    account(model, Case("gpt2-tied", (2, 1, 1, 2)).plan())
    assert [name for name, _ in model.named_modules()] == before


def test_modules_around_the_layers_are_counted() -> None:
    # As in OPT-350m: embedding and head are narrower than the layers, with projections between
    # them.
    sizes = {"hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 16, "vocab_size": 98, "num_hidden_layers": 2}
    model = build_meta_model(
        load_hf_config(ModelConfig(type="opt", config={**sizes, "num_attention_heads": 4})), dtype=torch.float32
    )
    before, after = 32 * 16, 32 * 16 + 16 * 98
    assert flops_around_layers(model) == (6 * before, 6 * after)
    layer = 4 * 32 * 32 + 2 * 32 * 48
    assert flops_per_token(model, 10) == 6 * (before + 2 * layer + after) + 2 * 6 * 10 * 32


def test_head_of_a_model_that_cannot_be_cut_is_counted() -> None:
    config = load_hf_config(ModelConfig(type="rwkv", config={"hidden_size": 32, "vocab_size": 98}))
    assert flops_around_layers(build_meta_model(config, dtype=torch.float32, attention="eager")) == (0, 6 * 32 * 98)
