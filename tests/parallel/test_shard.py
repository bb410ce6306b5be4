"""Levels of sharding and gathering ahead compute what one process computes."""

from tests.parity import Case, prove


def test_levels_train_like_one_process() -> None:
    prove(
        Case("gpt2-tied", (1, 1, 2, 1), level=1),
        Case("gpt2-tied", (1, 1, 2, 1), level=2),
        Case("llama-untied", (1, 1, 2, 1), level=2, recompute=1, prefetch=2),
        Case("llama-untied", (1, 1, 2, 1), prefetch=1),
        Case("llama-untied", (1, 1, 2, 1), prefetch=3, recompute=1),
        Case("gpt2-tied", (1, 1, 2, 1), level=2, compiled=True),
        Case("gpt2-tied", (1, 1, 2, 1), level=2, offload="cpu"),
    )


def test_levels_train_like_one_process_with_other_axes() -> None:
    prove(
        Case("gpt2-tied", (2, 1, 2, 1), level=2),
        Case("gpt2-tied", (2, 1, 2, 1), level=1),
        Case("llama-tied", (2, 1, 2, 1), "Interleaved1F1B", 2, level=2),
        Case("llama-tied", (2, 1, 2, 1), "GPipe", level=2, recompute=1),
        Case("llama-tied", (2, 1, 2, 1), level=3, reshard="always", prefetch=2),
        Case("llama-untied", (1, 1, 2, 2), level=2, sequence_parallel=True),
        Case("gpt2-tied", (1, 2, 2, 1), level=2),
        Case("qwen3", (1, 2, 2, 1), level=1),
    )
