"""With head and loss in chunks, plans train like the stock model, without all logits."""

from functools import partial

import pytest

from tests.parity import Case, prove

# A microbatch has 32 tokens in two rows, so the second chunk of 13 tokens is of both, and the last
# one is shorter.
In13 = partial(Case, chunk_tokens=13)
MODELS = ("gpt2-tied", "llama-untied", "qwen3")


@pytest.mark.parametrize(
    "mesh", [(1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 2, 1), (1, 2, 1, 1), (1, 1, 1, 2), (2, 1, 1, 2), (1, 1, 2, 2)], ids=str
)
def test_chunks_train_like_one_process(mesh: tuple[int, int, int, int]) -> None:
    prove(*(In13(model, mesh) for model in MODELS))


def test_chunks_of_a_split_sequence_train_like_one_process() -> None:
    """The vocabulary of 101 tokens is not divided evenly."""
    mesh = (2, 1, 1, 2)
    prove(
        In13("gpt2-odd", mesh, sequence_parallel=True),
        In13("llama-tied", mesh, sequence_parallel=True, loss_parallel=False),
    )


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank"),
    [("GPipe", 1), ("Interleaved1F1B", 2), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2), ("DualPipeV", 2)],
)
def test_chunks_train_like_one_process_under_every_schedule(schedule: str, stages_per_rank: int) -> None:
    """Some schedules run the backward pass of the loss twice, or have both ends of a tie."""
    prove(*(In13(model, (2, 1, 1, 1), schedule, stages_per_rank) for model in ("gpt2-tied", "llama-untied")))


def test_chunks_train_like_one_process_with_recomputation_compilation_and_padding() -> None:
    mesh = (1, 1, 2, 2)
    prove(
        In13("qwen3", mesh, recompute=1),
        In13("llama-tied", mesh, recompute=1, recompute_mode="selective"),
        In13("llama-untied", mesh, compiled=True),
        In13("gpt2-tied", mesh, rows="padded", reshard="never"),
        In13("gpt2-tied", mesh, rows="bucketed", offload="cpu"),
    )


def test_a_stage_with_only_the_head_runs_in_chunks() -> None:
    prove(*(In13(model, (2, 1, 1, 1), layers=(4, 0)) for model in ("gpt2-tied", "llama-untied")))
