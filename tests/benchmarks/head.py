"""Measure memory and seconds of head and loss in chunks, beside all logits at once.

python -m tests.benchmarks.head [--repeat 3] [--chunks auto 1024 128]

A Llama with one small layer, a hidden size of 512 and a vocabulary of 131,072 runs forward and
backward on a microbatch of 4,096 tokens, in float32. Memory is what belongs to the process alone
(RssAnon), at its peak above the level before the pass; each variant has a process of its own. For
the seconds all variants live in one process and take turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from meshtrain.config.families import with_family
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import LossPlan, ParallelPlan
from meshtrain.config.run import ModelConfig
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.runtime.mesh import init_mesh
from meshtrain.training.loss import build_loss
from tests.allocator import return_freed_memory
from tests.benchmarks.loading_weights import AnonymousPeak, status_bytes
from tests.ranks import run_on_ranks

Chunk = int | Literal["auto"]
SHAPE: dict[str, Any] = {
    "vocab_size": 131_072,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "max_position_embeddings": 4_096,
    "tie_word_embeddings": True,
}
SMALL = {**SHAPE, "vocab_size": 1_024, "hidden_size": 64, "num_attention_heads": 4}
TOKENS, FEW_TOKENS, WARM_UP = 4_096, 512, 16
MIB = 2**20


def build_pass(shape: dict[str, Any], tokens: int, chunk: Chunk) -> tuple[Callable[[int], float], int]:
    """Return a function that runs the pass on a number of tokens, and the tokens of a chunk."""
    model = build_meta_model(load_hf_config(ModelConfig(type="llama", config=shape)), dtype=torch.float32)
    plan = with_family(ParallelPlan(mesh=MeshPlan(dp_shard=1), loss=LossPlan(chunk_tokens=chunk)), "llama")
    plan = resolve_plan(plan, model, BatchShape(1, 1, tokens), 1)
    pipeline = build_pipeline(
        model, init_mesh(plan.mesh, "cpu"), plan, micro_batch_size=1, seed=0, device=torch.device("cpu")
    )
    pipeline.initialize(0)
    loss = build_loss(pipeline)

    def run(tokens: int) -> float:
        stream = torch.Generator().manual_seed(0)
        ids, labels = torch.randint(0, shape["vocab_size"], (2, 1, tokens), generator=stream)
        for _, parameter in pipeline.named_parameters():
            parameter.grad = None
        begin = time.perf_counter()
        pipeline.forward_backward({"input_ids": ids, "labels": labels}, loss.mean_over(torch.tensor(tokens)))
        return time.perf_counter() - begin

    return run, plan.loss.size


def measure_memory(shape: dict[str, Any], tokens: int, chunk: Chunk) -> tuple[int, int]:
    """Return the tokens of a chunk, and the bytes of a pass at its peak."""
    torch.set_num_threads(2)
    return_freed_memory()
    run, size = build_pass(shape, tokens, chunk)
    run(WARM_UP)
    before, sampler = status_bytes("RssAnon"), AnonymousPeak()
    sampler.start()
    run(tokens)
    time.sleep(0.05)
    return size, sampler.peak - before


def measure_seconds(shape: dict[str, Any], tokens: int, chunks: list[Chunk], repeat: int) -> list[list[float]]:
    """Return the seconds of every variant in each round, after a pass on few tokens."""
    torch.set_num_threads(2)
    passes = [build_pass(shape, tokens, chunk)[0] for chunk in chunks]
    for run in passes:
        run(WARM_UP)
    rounds = []
    for number in range(repeat):
        seconds = [0.0] * len(passes)
        # The order alternates, because a pass finds the memory that the one before has freed.
        for index in list(range(len(passes)))[:: 1 if number % 2 else -1]:
            seconds[index] = passes[index](tokens)
        rounds.append(seconds)
    return rounds


def main() -> None:
    """Print one line per variant; the first one computes all logits at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--chunks", nargs="+", default=["auto", "1024", "128"])
    parser.add_argument("--small", action="store_true", help="a small vocabulary, to see that the benchmark works")
    options = parser.parse_args()
    shape, tokens = (SMALL, FEW_TOKENS) if options.small else (SHAPE, TOKENS)
    chunks: list[Chunk] = [0, *("auto" if text == "auto" else int(text) for text in options.chunks)]
    memory = [run_on_ranks(1, measure_memory, shape, tokens, chunk, timeout=1200.0)[0] for chunk in chunks]
    rounds = run_on_ranks(1, measure_seconds, shape, tokens, chunks, options.repeat, timeout=3600.0)[0]
    print(
        f"{'chunk tokens':>16}{'peak MiB':>12}{'of all':>8}{'seconds':>10}{'ratio':>8}   (medians of {options.repeat})"
    )
    for index, (chunk, (size, num_bytes)) in enumerate(zip(chunks, memory, strict=True)):
        name = f"auto = {size}" if chunk == "auto" else str(size)
        seconds = statistics.median(it[index] for it in rounds)
        ratio = statistics.median(it[index] / it[0] for it in rounds)
        share = num_bytes / memory[0][1]
        print(f"{name:>16}{num_bytes / MIB:12,.0f}{share:8.1%}{seconds:10.2f}{ratio:8.3f}", flush=True)


if __name__ == "__main__":
    main()
