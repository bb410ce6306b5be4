"""Every schedule of torch, with every supported number of stages, trains like the stock model."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from meshtrain.checkpoint.dcp.reading import read_metadata, tensor_entries
from meshtrain.checkpoint.dcp.store import write_checkpoint
from meshtrain.checkpoint.storage.publishing import Retention
from meshtrain.config.plan import PipelinePlan
from meshtrain.config.run import ModelConfig
from meshtrain.config.schedules import SCHEDULES, ScheduleName
from meshtrain.models.fused import join_parts
from meshtrain.models.initialize import restore_buffers
from meshtrain.models.layout import local_tensor
from meshtrain.parallel import schedule
from meshtrain.parallel.pipeline import Pipeline, full_tensor
from meshtrain.parallel.pretrained import load_pretrained
from meshtrain.parallel.schedule import stage_owners
from meshtrain.parallel.tied import TiedCopies
from meshtrain.training.state import load_state, saved_tensors
from meshtrain.training.step import StepContext, StepResult, evaluate, train_step
from meshtrain.verify.case import Trace
from meshtrain.verify.compare import tensor_error
from meshtrain.verify.parallel import build_step_context, local_rows
from tests.checkpoint.stages import manifest_of
from tests.parallel.steps import moments
from tests.parity import (
    GLOBAL_BATCH,
    GPT2,
    Case,
    assert_equal_to_reference,
    batches,
    build,
    fill,
    prove,
    run_case,
    run_with_small_messages,
    stock,
    stock_weights,
)
from tests.ranks import run_on_ranks

MODELS = ("gpt2-tied", "qwen3", "llama-untied")
BFS, ZERO, ZBV, DUAL = "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
SPLIT = (ZERO, ZBV, DUAL)
# Parts of eight layers, for two processes with this many stages each.
LAYERS = {1: (4, 4), 3: (2, 1, 1, 2, 1, 1), 4: (1,) * 8}


# The table of schedules against torch


def torch_schedule(name: ScheduleName, pp: int, per_rank: int, microbatches: int) -> Any:
    """Build torch's schedule as the first process has it, over placeholder stages."""
    owners = stage_owners(PipelinePlan(schedule=name, stages_per_rank=per_rank), pp)
    stages = [
        SimpleNamespace(
            stage_index=index,
            num_stages=len(owners),
            group_rank=0,
            group_size=pp,
            is_first=index == 0,
            is_last=index == len(owners) - 1,
            device=torch.device("cpu"),
            submod=nn.Identity(),
            has_backward=True,
        )
        for index, owner in enumerate(owners)
        if owner == 0
    ]
    kind = get_schedule_class(name)
    return kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, microbatches, loss_fn=torch.sum)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_table_matches_torch(name: ScheduleName) -> None:
    facts, kind = SCHEDULES[name], get_schedule_class(name)
    assert (facts.stages_per_rank == 1) == issubclass(kind, PipelineScheduleSingle)
    for pp in (2, 3, 4):
        for per_rank in [facts.stages_per_rank] if facts.stages_per_rank else [1, 2, 3]:
            for microbatches in range(1, 14):
                rounds = max(1, microbatches // pp)
                fits = {
                    "any number": True,
                    "one per stage": microbatches >= pp * per_rank,
                    "equal rounds": microbatches % rounds == 0,
                }[facts.microbatches]
                if not fits:
                    with pytest.raises(ValueError, match="microbatches"):
                        torch_schedule(name, pp, per_rank, microbatches)
                    continue
                built = torch_schedule(name, pp, per_rank, microbatches)
                if facts.stages_per_rank == 1:
                    continue
                orders = built.pipeline_order.values()
                kinds = {part.computation_type.name for order in orders for action in order for part in _parts(action)}
                assert ("BACKWARD_WEIGHT" in kinds) == facts.splits_backward
                owners = stage_owners(PipelinePlan(schedule=name, stages_per_rank=per_rank), pp)
                assert [built.stage_index_to_group_rank[stage] for stage in range(len(owners))] == owners


def _parts(action: Any) -> tuple[Any, ...]:
    return () if action is None else action.sub_actions or (action,)


def test_owners_of_stages() -> None:
    assert stage_owners(PipelinePlan(schedule="LoopedBFS", stages_per_rank=2), 3) == [0, 1, 2, 0, 1, 2]
    assert stage_owners(PipelinePlan(schedule="DualPipeV", stages_per_rank=2), 3) == [0, 1, 2, 2, 1, 0]
    assert stage_owners(PipelinePlan(schedule="ZBVZeroBubble"), 1) == [0]


# Parity


def test_schedules_on_two_processes_train_like_one_process() -> None:
    prove(
        *(Case(model, (2, 1, 1, 1), name, 2) for name in (ZERO, ZBV) for model in MODELS),
        Case("llama-untied", (2, 1, 1, 1), BFS, 2),
        Case("llama-untied", (2, 1, 1, 1), DUAL, 2),
        Case("qwen3-deep", (2, 1, 1, 1), "Interleaved1F1B", 3, layers=LAYERS[3]),
        Case("qwen3-deep", (2, 1, 1, 1), BFS, 1, layers=LAYERS[1]),
        Case("qwen3-deep", (2, 1, 1, 1), ZERO, 1, layers=LAYERS[1]),
        Case("qwen3-deep", (2, 1, 1, 1), ZERO, 3, layers=LAYERS[3]),
    )


def test_schedules_on_four_processes_train_like_one_process() -> None:
    prove(
        Case("gpt2-tied", (2, 1, 1, 2), BFS, 2),
        Case("llama-untied", (2, 1, 1, 2), ZERO, 2, sequence_parallel=True),
        Case("qwen3", (2, 1, 1, 2), ZBV, 2, recompute=1),
        Case("gpt2-tied", (2, 1, 1, 2), DUAL, 2, sequence_parallel=True),
        Case("gpt2-tied", (2, 1, 2, 1), ZBV, 2),
        Case("qwen3", (2, 1, 2, 1), DUAL, 2),
        # torch would gather and free the parameters of more than three stages within a step.
        Case("qwen3-deep", (2, 1, 2, 1), ZERO, 4, layers=LAYERS[4]),
        Case("qwen3-deep", (4, 1, 1, 1), ZBV, 2, layers=LAYERS[4]),
    )


def test_replicas_sum_the_gradients_of_a_split_backward() -> None:
    prove(
        Case("gpt2-tied", (2, 2, 1, 1), ZBV, 2),
        Case("llama-untied", (2, 2, 1, 1), DUAL, 2),
        run=run_with_small_messages,
    )


def test_schedules_on_eight_processes_train_like_one_process() -> None:
    prove(Case("qwen3", (2, 1, 2, 2), ZBV, 2, sequence_parallel=True), Case("gpt2-tied", (2, 1, 2, 2), DUAL, 2))


# Damage that the comparison must detect


def lose_gradients(name: str) -> Trace:
    return run_case(Case("llama-untied", (2, 1, 2, 1), name, 2, reshard="always"))


def test_split_backward_with_resharding_is_detected() -> None:
    """Without the check that refuses it, torch loses the weight gradients of some microbatches."""
    for name in (ZBV, DUAL):
        traces = run_on_ranks(4, lose_gradients, name)
        with pytest.raises(AssertionError, match=r"'gradient', where='(model\.layers\.[123]|model\.norm|lm_head)\."):
            assert_equal_to_reference(traces, stock("llama-untied"))


def skip_tied_reduction() -> Trace:
    TiedCopies.reduce_gradients = lambda self: None  # type: ignore[method-assign]
    return run_case(Case("gpt2-tied", (2, 1, 1, 1), ZBV, 2))


def test_tied_copy_that_is_not_reduced_is_detected() -> None:
    with pytest.raises(AssertionError, match=r"'gradient', where='transformer\.wte\.weight'"):
        assert_equal_to_reference(run_on_ranks(2, skip_tied_reduction), stock("gpt2-tied"))


# Dropout

WET = ModelConfig(type="gpt2", config={**GPT2, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1})
DROPPED = [
    Case("gpt2-tied", (2, 1, 1, 1), "Interleaved1F1B", 2),
    Case("gpt2-tied", (2, 1, 1, 1), BFS, 2),
    *(Case("gpt2-tied", (2, 1, 1, 1), name, 2) for name in SPLIT),
    Case("gpt2-tied", (2, 1, 1, 1), ZBV, 2, recompute=1),
]


def drop() -> list[dict[str, Tensor]]:
    """Return the gradients of a step of every case, and of repeats of the first and the last."""
    found = []
    for case in (*DROPPED, DROPPED[0], DROPPED[-1]):
        pipeline = build(case, model=WET)
        fill(pipeline, stock_weights(case.model))
        step(build_step_context(pipeline), 0)
        gradients = {name: full_tensor(p.grad) for name, p in pipeline.owned_parameters().items()}
        found.append(join_parts(gradients, pipeline.fused))
    return found


def step(context: StepContext, number: int) -> StepResult:
    return train_step(context, number, local_rows(context.pipeline, batches()[number]), np.arange(GLOBAL_BATCH))


def test_dropout_is_equal_under_every_schedule() -> None:
    """The masks depend on stage and microbatch, not on the stage's rank or its order."""
    runs = [{**first, **second} for first, second in zip(*run_on_ranks(2, drop), strict=True)]
    *each, again, recomputed_again = runs
    for case, gradients in zip(DROPPED, each, strict=True):
        assert gradients.keys() == stock("gpt2-tied").gradients[0].keys()
        for name, gradient in gradients.items():
            assert tensor_error(gradient, each[0][name]) <= 1e-12, (case, name)
    for one, other in ((each[0], again), (each[-1], recomputed_again)):
        assert all(torch.equal(one[name], other[name]) for name in one)
    dry = stock("gpt2-tied").gradients[0]
    assert max(tensor_error(gradient, dry[name]) for name, gradient in again.items()) > 1e-2


# Tied weights with both ends on one process, through files

EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"


@dataclass
class Travel:
    """The results of one process on its way from 1F1B to ZBVZeroBubble and back.

    Attributes:
        steps: the third step on every schedule, as (loss, gradient norm).
        twins: whether both ends are bit-equal after a load, a step, initialization, pretrained.
        keys: of the checkpoints that each schedule wrote.
    """

    steps: list[tuple[float, float]]
    twins: list[bool]
    keys: list[set[str]]


def travel(folder: Path) -> Travel:
    seen = Travel([], [], [])
    context = start(Case("gpt2-tied", (2, 1, 2, 1)))
    fill(context.pipeline, stock_weights("gpt2-tied"))
    for number in (0, 1):
        step(context, number)
    checkpoint = save(folder / "1F1B", context, seen)
    note(step(context, 2), seen)
    context = resume(Case("gpt2-tied", (2, 1, 1, 2), ZBV, 2), checkpoint)
    seen.twins.append(are_twins(context))
    checkpoint = save(folder / "ZBV", context, seen)
    note(step(context, 2), seen)
    seen.twins.append(are_twins(context))
    note(step(resume(Case("gpt2-tied", (2, 2, 1, 1)), checkpoint), 2), seen)
    context = start(Case("gpt2-tied", (2, 1, 2, 1), DUAL, 2))
    pipeline = context.pipeline
    pipeline.initialize(0)
    seen.twins.append(are_twins(context, only_values=True))
    load_pretrained(pipeline, folder)
    seen.twins.append(are_twins(context, only_values=True))
    return seen


def start(case: Case) -> StepContext:
    return build_step_context(build(case))


def resume(case: Case, checkpoint: Path) -> StepContext:
    context = start(case)
    for stage in context.pipeline.stages:
        restore_buffers(stage.model)
    load_state(checkpoint, context.pipeline, context.optimizer)
    return context


def save(folder: Path, context: StepContext, seen: Travel) -> Path:
    tensors = saved_tensors(context.pipeline, context.optimizer)
    checkpoint = write_checkpoint(
        folder, tensors, manifest=manifest_of(2), huggingface=None, retention=Retention(newest=1)
    )
    seen.keys.append(set(tensor_entries(read_metadata(checkpoint), "")))
    return checkpoint


def note(result: StepResult, seen: Travel) -> None:
    seen.steps.append((result.loss, result.gradient_norm))


def are_twins(context: StepContext, *, only_values: bool = False) -> bool:
    """Return whether both ends on this process are equal, and nowhere all zero or unset."""
    parameters = dict(context.pipeline.named_parameters())
    if HEAD not in parameters or EMBEDDING not in parameters:
        return True
    pairs = [(parameters[EMBEDDING], parameters[HEAD])]
    if not only_values:
        near, far = (moments(context.optimizer, parameters[end]) for end in (EMBEDDING, HEAD))
        pairs += [(near[moment], far[moment]) for moment in near]
    locals_ = [(local_tensor(near.detach()), local_tensor(far.detach())) for near, far in pairs]
    return all(torch.equal(near, far) and bool(near.any()) for near, far in locals_)


def test_tied_weights_travel_between_schedules(tmp_path: Path) -> None:
    save_file(stock_weights("gpt2-tied"), tmp_path / "model.safetensors")
    for seen in run_on_ranks(4, travel, tmp_path):
        assert seen.twins == [True] * 4
        assert seen.keys[0] == seen.keys[1]
        assert len([key for key in seen.keys[0] if key.endswith((EMBEDDING, HEAD))]) == 4
        for found in seen.steps[1:]:
            assert found == pytest.approx(seen.steps[0], rel=1e-12)
        expected = stock("gpt2-tied")
        assert seen.steps[0] == pytest.approx((expected.losses[2], expected.norms[2]), rel=1e-12)


# Evaluation

EVALUATED = [
    Case("qwen3-deep", (2, 1, 2, 1), "Interleaved1F1B", 3, layers=LAYERS[3]),
    Case("qwen3-deep", (2, 1, 2, 1), ZBV, 2, layers=(2, 2, 2, 2)),
    Case("qwen3-deep", (4, 1, 1, 1), "Interleaved1F1B", 2, layers=LAYERS[4]),
    Case("qwen3-deep", (4, 1, 1, 1), ZBV, 2, layers=LAYERS[4]),
    Case("qwen3-deep", (4, 1, 1, 1), "GPipe", layers=(2, 2, 2, 2)),
]
Message = tuple[str, int]


def record_messages() -> list[tuple[float, list[Message]]]:
    """Evaluate, and return the loss and the messages of this process in order."""
    messages: list[Message] = []

    def recv(tensor: Tensor, *, group: dist.ProcessGroup, group_src: int) -> None:
        messages.append(("from", group_src))
        dist.recv(tensor, group=group, group_src=group_src)

    def isend(tensor: Tensor, *, group: dist.ProcessGroup, group_dst: int) -> dist.Work | None:
        messages.append(("to", group_dst))
        return dist.isend(tensor, group=group, group_dst=group_dst)

    schedule.dist = SimpleNamespace(recv=recv, isend=isend)  # type: ignore[assignment]
    heard = []
    for case in EVALUATED:
        pipeline: Pipeline = build(case)
        pipeline.initialize(0)
        messages.clear()
        loss = evaluate(build_step_context(pipeline), [local_rows(pipeline, batches()[0])]).loss
        heard.append((loss, list(messages)))
    return heard


def test_evaluation_sends_in_the_order_of_the_receiver() -> None:
    """NCCL runs the messages of two processes in order; a different order on both sides hangs."""
    answers = run_on_ranks(4, record_messages)
    for number, case in enumerate(EVALUATED):
        pp, data_degree = case.mesh[0], case.mesh[2]
        heard = [answers[rank * data_degree][number][1] for rank in range(pp)]
        assert any(heard)
        for one in range(pp):
            for other in range(one):
                there = [{"to": "from", "from": "to"}[way] for way, peer in heard[one] if peer == other]
                assert there == [way for way, peer in heard[other] if peer == one], (case, one, other)
                assert (one, other) != (1, 0) or there
        assert {loss for loss, _ in (answer[number] for answer in answers)} == {answers[0][number][0]}
        assert answers[0][number][0] == pytest.approx(answers[0][0][0], rel=1e-12)
