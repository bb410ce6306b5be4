"""Levels of sharding, when gradients are reduced, and how far FSDP2 gathers ahead."""

from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshtrain.compat.fsdp import gathered_parameters, unreduced_gradients
from meshtrain.compat.operators_seen import name_of
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import PrecisionPlan
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.shard import fsdp_modules
from meshtrain.runtime.activity import Activity
from meshtrain.training.loss import build_loss
from meshtrain.verify.parallel import local_rows
from tests.parallel.test_check import BATCH, make_plan, meta_model, problems
from tests.parity import Case, batches, build, fill, prove, stock_weights
from tests.ranks import run_on_ranks


def test_levels_train_like_one_process() -> None:
    prove(
        Case("gpt2-tied", (1, 1, 2, 1), level=1),
        Case("gpt2-tied", (1, 1, 2, 1), level=2, compiled=True),
        Case("llama-untied", (1, 1, 2, 1), level=2, recompute=1, prefetch=2),
        Case("llama-untied", (1, 1, 2, 1), recompute=1, prefetch=1),
        Case("gpt2-tied", (1, 1, 2, 1), level=2, offload="cpu"),
        Case("llama-untied", (1, 1, 2, 1), reduction="each_microbatch", prefetch=9),
    )


def test_levels_train_like_one_process_with_other_axes() -> None:
    prove(
        Case("gpt2-tied", (2, 1, 2, 1), level=1),
        Case("gpt2-tied", (2, 1, 2, 1), level=2),
        Case("llama-tied", (2, 1, 2, 1), "Interleaved1F1B", 2, level=2),
        Case("llama-tied", (2, 1, 2, 1), "GPipe", level=2, recompute=1),
        Case("llama-untied", (2, 1, 2, 1), reshard="always", prefetch=2),
        Case("llama-untied", (2, 1, 2, 1), reshard="always", reduction="each_microbatch"),
        Case("llama-untied", (1, 1, 2, 2), level=2, sequence_parallel=True),
        Case("gpt2-tied", (1, 2, 2, 1), level=2),
        Case("qwen3", (1, 2, 2, 1), level=1),
    )


Held = tuple[int, int, int]


def held_between_microbatches(case: Case) -> Held:
    """Return the bytes of gathered parameters, full gradients and parts of gradients in a step."""
    pipeline = build(case)
    fill(pipeline, stock_weights(case.model))
    # Others take their place while they are gathered.
    sharded = [parameter for _, parameter in pipeline.named_parameters()]
    found: list[Held] = []

    def look(activity: Activity) -> None:
        if (activity.phase, activity.microbatch) == ("forward", 2):
            found.append(held(pipeline, sharded))

    pipeline.activity.listener = look
    pipeline.forward_backward(local_rows(pipeline, batches()[0]), build_loss(pipeline))
    after = held(pipeline, sharded)
    assert after[:2] == (0, 0), "a full parameter or gradient outlives the last backward pass"
    return found[0]


def held(pipeline: Pipeline, sharded: list[nn.Parameter]) -> Held:
    modules = [module for stage in pipeline.stages for module in fsdp_modules(stage.model)]
    gathered = [it for module in modules for it in gathered_parameters(module)]
    unreduced = [it for module in modules for it in unreduced_gradients(module)]
    gradients = [it.grad for it in sharded if it.grad is not None]
    return bytes_of(gathered), bytes_of(unreduced), bytes_of(gradients)


def bytes_of(tensors: list[Any]) -> int:
    return sum(local.untyped_storage().nbytes() and local.numel() * 8 for local in map(local_tensor, tensors))


def held_in_each(cases: list[Case]) -> list[Held]:
    return [held_between_microbatches(case) for case in cases]


def test_a_level_keeps_what_it_says() -> None:
    cases = [
        Case("gpt2-tied", (1, 1, 2, 1), level=1),
        Case("gpt2-tied", (1, 1, 2, 1), level=2),
        Case("gpt2-tied", (1, 1, 2, 1)),
        Case("gpt2-tied", (1, 1, 2, 1), reduction="each_microbatch"),
    ]
    full = sum(value.numel() * 8 for value in _full_weights().values())
    kept, parts, freed, least = run_on_ranks(2, held_in_each, cases)[0]
    assert kept == (full, full, 0)
    assert parts == (full, 0, full // 2)
    assert freed == (0, full, 0)
    assert least == (0, 0, full // 2)


class Gathers(TorchDispatchMode):
    """Counts the gathers of FSDP2."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += name_of(func)[1] == "_allgather_base_"
        return func(*args, **(kwargs or {}))


def gathers_of(case: Case) -> tuple[int, int, int]:
    """Return the gathers of a step, the number of its layers and that of its microbatches."""
    pipeline = build(case)
    fill(pipeline, stock_weights(case.model))
    batch = local_rows(pipeline, batches()[0])
    with Gathers() as gathers:
        pipeline.forward_backward(batch, build_loss(pipeline))
    layers = [layer for stage in pipeline.stages for layer in stage.own_layers()]
    return gathers.number, len(layers), len(batch["labels"]) // pipeline.micro_batch_size


def test_the_root_is_gathered_once_per_microbatch_and_layers_twice() -> None:
    number, layers, microbatches = run_on_ranks(2, gathers_of, Case("llama-untied", (1, 1, 2, 1)))[0]
    assert microbatches > 1
    assert number == microbatches * (1 + 2 * layers)


def _full_weights() -> dict[str, Tensor]:
    return {name: it for name, it in stock_weights("gpt2-tied").items() if name != "lm_head.weight"}


@pytest.mark.parametrize(
    ("shard", "mesh", "reshard", "reduction"),
    [
        ({}, {"dp_shard": 4}, "always", "each_step"),
        ({"level": 1}, {"dp_shard": 4}, "never", "each_step"),
        ({"level": 2}, {"dp_shard": 4}, "never", "each_microbatch"),
        ({"level": 2, "reshard_after_forward": "never"}, {"pp": 2, "dp_shard": 2}, "never", "each_microbatch"),
        ({"reduce_gradients": "each_microbatch"}, {"dp_shard": 4}, "always", "each_microbatch"),
    ],
)
def test_levels_are_resolved(shard: dict[str, Any], mesh: dict[str, int], reshard: str, reduction: str) -> None:
    found = resolve_plan(make_plan("llama", mesh=mesh, shard=shard), meta_model("llama"), BATCH, 4).shard
    assert (found.reshard_after_forward, found.reduce_gradients) == (reshard, reduction)


def test_contradictions_of_a_level_are_refused() -> None:
    mesh = {"dp_shard": 2}
    assert problems(make_plan("llama", mesh=mesh, shard={"level": 1, "reshard_after_forward": "always"})) == (
        "shard.level = 1 keeps full parameters during a step, but shard.reshard_after_forward = 'always' frees them "
        "after each pass; leave one of them out",
    )
    assert problems(make_plan("llama", mesh=mesh, shard={"level": 2, "reduce_gradients": "each_step"})) == (
        "shard.level = 2 reduces gradients 'each_microbatch', but shard.reduce_gradients = 'each_step'; leave it out, "
        "or set shard.level = 1",
    )
    assert problems(make_plan("llama", mesh={"dp_replicate": 2, "dp_shard": 1}, shard={"level": 1})) == (
        "shard.level = 1 shards over dp_shard, ep and cp, but each of the 2 copies of dp_replicate holds all "
        "parameters, so nothing would be sharded; set "
        "mesh.dp_shard = 2 in place of dp_replicate, or leave the level out",
    )


def test_reductions_that_would_lose_gradients_or_bits_are_refused() -> None:
    pipeline = {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}
    plan = make_plan("llama", mesh={"pp": 2, "dp_shard": 2}, pipeline=pipeline, shard={"level": 2})
    assert problems(plan) == (
        "shard.level = 2 reduces the gradients of each microbatch, but pipeline.schedule = 'ZBVZeroBubble' computes "
        "those of the weights in passes without the hooks of FSDP2; use 1F1B or Interleaved1F1B, or reduce them once "
        "per step (shard.level 1 or 3)",
    )
    plan = make_plan("llama", mesh={"dp_shard": 2}, shard={"reduce_gradients": "each_microbatch"})
    pure = plan.model_copy(update={"precision": PrecisionPlan(parameters="bfloat16", compute="bfloat16")})
    assert problems(pure) == (
        "shard.reduce_gradients = 'each_microbatch' reduces the gradients of each microbatch and adds them up in the "
        "number format of the parameters, bfloat16, but precision.reduce = 'float32'; set precision.parameters = "
        "'float32', or reduce them once per step (shard.level 1 or 3)",
    )
    # One microbatch adds up nothing, and over dp_replicate FSDP2 adds up in float32.
    assert resolve_plan(pure, meta_model("llama"), BatchShape(2, 1, 12), 2)
    copies = pure.model_copy(update={"mesh": MeshPlan(dp_replicate=2, dp_shard=2)})
    assert resolve_plan(copies, meta_model("llama"), BATCH, 4)
