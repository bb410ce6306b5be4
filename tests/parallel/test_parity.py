"""In float64, every plan computes what the stock model computes in one process."""

import pytest

from tests.parity import Case, prove, run_with_small_messages

MODELS = ("gpt2-tied", "llama-untied", "llama-tied", "qwen3")
# pp, dp_replicate, dp_shard, tp
MESHES = (
    (1, 1, 1, 1),
    (2, 1, 1, 1),
    (4, 1, 1, 1),
    (1, 1, 2, 1),
    (1, 1, 4, 1),
    (1, 1, 1, 2),
    (1, 1, 1, 4),
    (2, 1, 2, 1),
    (2, 1, 1, 2),
    (1, 1, 2, 2),
    (2, 1, 2, 2),
    (1, 2, 2, 1),
)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh)))
def test_every_mesh_trains_like_one_process(mesh: tuple[int, int, int, int]) -> None:
    prove(*(Case(model, mesh) for model in MODELS))


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2)])
def test_every_schedule_trains_like_one_process(schedule: str, stages_per_rank: int) -> None:
    prove(*(Case(model, (2, 1, 1, 2), schedule, stages_per_rank) for model in MODELS))


@pytest.mark.parametrize("loss_parallel", [True, False])
@pytest.mark.parametrize("mesh", [(1, 1, 1, 2), (2, 1, 1, 2), (1, 1, 2, 2)], ids=str)
def test_sequence_and_loss_parallel_train_like_one_process(
    mesh: tuple[int, int, int, int], loss_parallel: bool
) -> None:
    prove(*(Case(model, mesh, sequence_parallel=True, loss_parallel=loss_parallel) for model in MODELS))


def test_loss_parallel_off_trains_like_one_process() -> None:
    prove(*(Case(model, (2, 1, 1, 2), loss_parallel=False) for model in MODELS))


def test_sequence_parallel_interleaved_trains_like_one_process() -> None:
    prove(*(Case(m, (2, 1, 1, 2), "Interleaved1F1B", 2, sequence_parallel=True) for m in ("gpt2-tied", "qwen3")))


def test_sequence_parallel_with_one_sequence_per_microbatch_trains_like_one_process() -> None:
    """GPT-2 gives its output the shape of its input, so errors show with one sequence only."""
    prove(Case("gpt2-tied", (2, 1, 2, 2), sequence_parallel=True))


@pytest.mark.parametrize("model", ["qwen2-grouped", "mistral-grouped"])
def test_grouped_query_heads_train_like_one_process(model: str) -> None:
    prove(Case(model, (2, 1, 1, 2)), Case(model, (1, 1, 2, 2), sequence_parallel=True), Case(model, (1, 2, 1, 2)))


def test_padded_samples_train_like_one_process() -> None:
    prove(
        Case("gpt2-tied", (2, 1, 1, 2), rows="padded"),
        Case("llama-untied", (2, 1, 2, 1), rows="padded"),
        Case("qwen3", (2, 1, 1, 2), "Interleaved1F1B", 2, sequence_parallel=True, rows="padded"),
    )


def test_separate_documents_train_like_one_process() -> None:
    """The reference trains documents alone: no position, attention, target crosses a border."""
    prove(
        Case("gpt2-tied", (2, 1, 1, 1), rows="separate"),
        Case("llama-untied", (1, 1, 1, 2), rows="separate"),
        Case("mistral-grouped", (1, 1, 2, 1), rows="separate"),
    )


def test_separate_documents_train_like_one_process_on_four_ranks() -> None:
    prove(
        Case("llama-tied", (2, 1, 1, 2), rows="separate"),
        Case("qwen3", (2, 1, 1, 2), "Interleaved1F1B", 2, sequence_parallel=True, rows="separate"),
        Case("gpt2-tied", (2, 1, 1, 2), "ZBVZeroBubble", 2, rows="separate"),
        Case("qwen3", (1, 1, 2, 2), recompute=1, rows="separate"),
        Case("qwen2-grouped", (2, 1, 1, 2), compiled=True, rows="separate"),
    )


def test_batches_of_different_widths_train_like_one_process() -> None:
    prove(
        Case("gpt2-tied", (2, 1, 1, 2), rows="bucketed"),
        Case("llama-untied", (2, 1, 2, 1), rows="bucketed"),
        Case("qwen3", (2, 1, 1, 2), "Interleaved1F1B", 2, sequence_parallel=True, rows="bucketed"),
        Case("llama-tied", (2, 1, 1, 2), "ZBVZeroBubble", 2, rows="bucketed"),
        Case("gpt2-tied", (2, 1, 2, 1), "DualPipeV", 2, rows="bucketed"),
    )
    prove(
        Case("llama-tied", (2, 1, 1, 1), "GPipe", rows="bucketed"),
        Case("gpt2-tied", (2, 1, 1, 1), "LoopedBFS", 2, rows="bucketed"),
        Case("qwen3", (2, 1, 1, 1), "InterleavedZeroBubble", 2, rows="bucketed"),
    )


@pytest.mark.parametrize("model", ["llama-longrope", "llama-dynamic"])
def test_length_dependent_rotary_frequencies_train_like_one_process(model: str) -> None:
    """The batches are long, shorter, short, and long again."""
    prove(
        Case(model, (2, 1, 1, 1), recompute=1, rows="bucketed"),
        Case(model, (1, 1, 1, 2), sequence_parallel=True, rows="bucketed"),
        Case(model, (1, 1, 2, 1), recompute=1, recompute_mode="selective", compiled=True, rows="bucketed"),
    )
    prove(
        Case(model, (2, 1, 1, 2), "Interleaved1F1B", 2, recompute=1, rows="bucketed"),
        Case(model, (2, 1, 2, 1), "ZBVZeroBubble", 2, rows="bucketed"),
    )


def test_uneven_stages_and_a_head_only_stage_train_like_one_process() -> None:
    prove(
        Case("gpt2-tied", (2, 1, 1, 2), layers=(3, 1)),
        Case("gpt2-tied", (2, 1, 1, 2), layers=(4, 0)),
        Case("qwen3", (2, 1, 1, 2), layers=(4, 0), sequence_parallel=True),
        Case("llama-untied", (2, 1, 2, 1), "Interleaved1F1B", 2, layers=(1, 2, 1, 0)),
    )


def test_one_stage_per_layer_and_head_trains_like_one_process() -> None:
    prove(
        Case("gpt2-short", (4, 1, 1, 1), layers=(1, 1, 1, 0)),
        Case("gpt2-short", (2, 1, 1, 2), "Interleaved1F1B", 2, layers=(1, 1, 1, 0)),
    )


def test_recompute_trains_like_one_process() -> None:
    prove(
        Case("gpt2-tied", (2, 1, 1, 2), recompute=1),
        Case("llama-untied", (1, 1, 2, 2), recompute=2, sequence_parallel=True),
        Case("qwen3", (2, 1, 2, 1), "Interleaved1F1B", 2, recompute=1),
    )


def test_selective_recompute_trains_like_one_process() -> None:
    prove(
        Case("qwen3", (1, 1, 1, 2), recompute=1, recompute_mode="selective", sequence_parallel=True),
        Case("gpt2-tied", (1, 1, 1, 2), recompute=2, recompute_mode="selective"),
        Case("llama-tied", (2, 1, 1, 1), "Interleaved1F1B", 2, recompute=1, recompute_mode="selective"),
        Case("gpt2-tied", (1, 1, 2, 1), recompute=1, recompute_mode="selective", reshard="always"),
        Case("llama-untied", (1, 1, 2, 1), recompute=1, recompute_mode="selective", compiled=True),
    )


def test_offload_trains_like_one_process() -> None:
    prove(
        Case("gpt2-tied", (2, 1, 1, 1), offload="cpu"),
        Case("qwen3", (1, 1, 1, 2), offload="cpu", sequence_parallel=True, recompute=1),
        Case("llama-tied", (1, 2, 1, 1), offload="cpu"),
    )


def test_resharding_policies_train_like_one_process() -> None:
    prove(
        Case("gpt2-tied", (2, 1, 2, 1), reshard="always"),
        Case("llama-untied", (1, 1, 2, 2), reshard="never"),
        Case("llama-tied", (2, 1, 2, 1), "Interleaved1F1B", 2, reshard="always"),
    )


def test_compiled_layers_train_like_one_process() -> None:
    prove(
        Case("gpt2-tied", (1, 1, 1, 2), compiled=True),
        Case("llama-untied", (1, 1, 2, 1), compiled=True, recompute=1),
        Case("qwen3", (2, 1, 1, 1), compiled=True),
        Case("qwen3", (1, 1, 1, 2), compiled=True, recompute=1, sequence_parallel=True),
        Case("gpt2-tied", (1, 1, 1, 2), compiled=True, sequence_parallel=True),
    )


def test_replicas_that_reduce_during_the_backward_pass_train_like_one_process() -> None:
    cases = [
        Case("gpt2-tied", (1, 2, 1, 2)),
        Case("qwen3", (2, 2, 1, 1)),
        Case("llama-tied", (1, 4, 1, 1), recompute=1),
    ]
    prove(*cases, run=run_with_small_messages)


def test_vocabulary_that_tp_does_not_divide_trains_like_one_process() -> None:
    prove(Case("gpt2-odd", (2, 1, 1, 2)), Case("gpt2-odd", (1, 1, 2, 2), loss_parallel=False))
