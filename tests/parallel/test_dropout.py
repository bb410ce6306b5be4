"""Dropout on a mesh: equal on replicas, different where work is split, and reproducible."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtrain.config.families import with_family
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ParallelPlan, RecomputePlan, TensorPlan
from meshtrain.config.run import ModelConfig
from meshtrain.models.layout import local_tensor
from meshtrain.models.tiny import default_config
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.randomness import Streams, stream_key
from meshtrain.training.step import evaluate
from meshtrain.verify.case import SEQUENCE, ProofCase
from meshtrain.verify.dropout import measure, with_dropout
from meshtrain.verify.parallel import build_step_context
from meshtrain.verify.verify_run import make_case
from tests.parallel.steps import start, take_step
from tests.parity import GPT2, MODELS, Case, batches, smallest_part
from tests.ranks import run_on_ranks

DROPOUT = {
    "gpt2-tied": {**GPT2, "n_layer": 3, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "llama-untied": {**MODELS["llama-untied"].config, "num_hidden_layers": 3, "attention_dropout": 0.1},
}
TENSOR, BOTH = (1, 1, 1, 2), (2, 1, 1, 2)
LAYERS = {TENSOR: (3,), BOTH: (2, 1)}


@dataclass(frozen=True)
class Run:
    """A few training steps with dropout."""

    case: Case
    attention: str = "eager"
    seed: int = 0
    steps: tuple[int, ...] = (0, 1, 2)

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(type=MODELS[self.case.model].type, config=DROPOUT[self.case.model], attention=self.attention)


@dataclass
class Seen:
    """What one process saw, and its final state.

    Attributes:
        masks: all drawn masks in order: where it was drawn, and the dropped elements.
        gradients: of the last step, this process's part.
        replicated: names of the parameters that are equal on every process of a tp group.
        parameters: after the last step, this process's part.
        streams: state of the random stream after each forward pass of a stage with logits.
    """

    masks: list[tuple[str, Tensor]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    replicated: set[str] = field(default_factory=set)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    streams: list[bytes] = field(default_factory=list)

    def of(self, kind: str) -> list[Tensor]:
        return [mask for found, mask in self.masks if found == kind]


def kind_of(mask: Tensor) -> str:
    """Return what a mask drops: attention probabilities, or the full stream or a part of it."""
    if mask.dim() == 4:
        return "heads"
    return "whole" if mask.shape[1] == SEQUENCE else "part"


@contextmanager
def watched_dropout(masks: list[tuple[str, Tensor]]) -> Iterator[None]:
    """Record the mask of every dropout that the model calls (except in torch's fused attention)."""
    original = nn.functional.dropout

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        result = original(x, p, training, inplace)
        if training and p and not x.is_meta:
            mask = (result == 0) & (x != 0)
            masks.append((kind_of(mask), mask))
        return result

    nn.functional.dropout = dropout
    try:
        yield
    finally:
        nn.functional.dropout = original


def train(run: Run) -> Seen:
    pipeline = start(run.case, model=run.model, seed=run.seed)
    context, seen = build_step_context(pipeline), Seen()
    if pipeline.has_last_stage:
        pipeline.stages[-1].model.register_forward_hook(
            lambda *_: seen.streams.append(torch.get_rng_state().numpy().tobytes())
        )
    with watched_dropout(seen.masks):
        for step in run.steps:
            take_step(context, step)
    for name, parameter in pipeline.named_parameters():
        assert parameter.grad is not None
        seen.gradients[name] = local_tensor(parameter.grad).clone()
        seen.parameters[name] = local_tensor(parameter.detach()).clone()
        if not isinstance(parameter, DTensor):
            seen.replicated.add(name)
    return seen


def train_all(runs: list[Run]) -> list[Seen]:
    return [train(run) for run in runs]


MAIN = {("gpt2-tied", "eager"), ("llama-untied", "sdpa")}
RUNS = {
    mesh: [
        Run(Case(model, mesh, layers=LAYERS[mesh], sequence_parallel=sequence_parallel), attention)
        for model in DROPOUT
        for attention in ("eager", "sdpa")
        for sequence_parallel in (False, True)
        if mesh == TENSOR or (model, attention) in MAIN
    ]
    for mesh in (TENSOR, BOTH)
}


def others(mesh: tuple[int, int, int, int]) -> list[Run]:
    """Return the runs to compare with the first ones."""
    runs = [run for run in RUNS[mesh] if (run.case.model, run.attention) in MAIN]
    recomputed = [replace(run, case=replace(run.case, recompute=1)) for run in runs]
    if mesh == BOTH:
        return recomputed
    first = runs[0]
    # The same run again, other steps, and another seed.
    return [*recomputed, replace(first), replace(first, steps=(3, 4, 5)), replace(first, seed=1)]


@functools.cache
def seen_on(mesh: tuple[int, int, int, int]) -> list[tuple[Run, list[Seen]]]:
    """Return every run with the observations of its processes."""
    runs = [*RUNS[mesh], *others(mesh)]
    answers = run_on_ranks(runs[0].case.world_size, train_all, runs)
    return [(run, [answer[number] for answer in answers]) for number, run in enumerate(runs)]


def peers(ranks: list[Seen]) -> Iterator[tuple[Seen, Seen]]:
    """Yield the processes of each tp group."""
    return zip(ranks[::2], ranks[1::2], strict=True)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def distinct(masks: list[Tensor]) -> bool:
    return len({(tuple(mask.shape), mask.numpy().tobytes()) for mask in masks}) == len(masks)


@pytest.mark.parametrize("mesh", [TENSOR, BOTH], ids=["tp", "pp-tp"])
def test_replicated_parameters_stay_equal(mesh: tuple[int, int, int, int]) -> None:
    for run, ranks in seen_on(mesh):
        for one, other in peers(ranks):
            assert one.replicated == other.replicated
            assert any("norm" in name or "ln_" in name for name in one.replicated)
            for name in one.replicated:
                assert torch.equal(one.parameters[name], other.parameters[name]), (run, name)
            # Sharded parameters are another part of the model.
            sharded = one.parameters.keys() - one.replicated
            assert not any(torch.equal(one.parameters[name], other.parameters[name]) for name in sharded)


@pytest.mark.parametrize("mesh", [TENSOR, BOTH], ids=["tp", "pp-tp"])
def test_masks_differ_exactly_where_the_work_is_split(mesh: tuple[int, int, int, int]) -> None:
    for run, ranks in seen_on(mesh):
        expected = {"heads"} if run.attention == "eager" else set()
        if run.case.model == "gpt2-tied":
            expected |= {"part", "whole"} if run.case.sequence_parallel else {"whole"}
        assert {kind for seen in ranks for kind, _ in seen.masks} == expected, run
        for one, other in peers(ranks):
            assert [kind for kind, _ in one.masks] == [kind for kind, _ in other.masks]
            assert one.streams == other.streams, "behind the layers the stream is shared again"
            for kind, equal in (("heads", False), ("part", False), ("whole", True)):
                for mine, theirs in zip(one.of(kind), other.of(kind), strict=True):
                    assert torch.equal(mine, theirs) == equal, (run, kind)
        if run.case.recompute == 0:
            # No mask is used twice over all stages, microbatches, layers and steps.
            assert distinct([mask for one, _ in peers(ranks) for _, mask in one.masks]), run
            assert distinct([mask for seen in ranks for kind, mask in seen.masks if kind != "whole"]), run


def test_dropped_fraction_is_the_probability() -> None:
    for run, ranks in seen_on(TENSOR):
        for kind in {kind for kind, _ in ranks[0].masks}:
            rows = torch.cat([mask.flatten().float() for seen in ranks for mask in seen.of(kind)])
            # The masked half of the probabilities is already zero.
            share = rows.mean().item() * (2 * SEQUENCE / (SEQUENCE + 1) if kind == "heads" else 1)
            assert share == pytest.approx(0.1, abs=0.01), (run, kind)


@pytest.mark.parametrize("mesh", [TENSOR, BOTH], ids=["tp", "pp-tp"])
def test_recomputation_repeats_the_masks(mesh: tuple[int, int, int, int]) -> None:
    found = seen_on(mesh)
    compared = 0
    for run, ranks in found:
        if run.case.recompute:
            plain = replace(run, case=replace(run.case, recompute=0))
            expected = next(seen for other, seen in found if other == plain)
            for ours, theirs in zip(ranks, expected, strict=True):
                assert same(ours.gradients, theirs.gradients), run
                assert same(ours.parameters, theirs.parameters), run
                again = {mask.numpy().tobytes() for _, mask in ours.masks}
                assert again == {mask.numpy().tobytes() for _, mask in theirs.masks}, run
                assert not theirs.masks or len(ours.masks) > len(theirs.masks), "nothing was computed twice"
            compared += 1
    assert compared == 4


def test_masks_are_reproducible_and_depend_on_step_and_seed() -> None:
    (run, first), *_ = seen_on(TENSOR)
    (_, again), (later, other_steps), (another, other_seed) = seen_on(TENSOR)[-3:]
    assert (later.steps, another.seed) == ((3, 4, 5), 1)
    for one, two in zip(first, again, strict=True):
        assert same(one.parameters, two.parameters), run
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one.masks, two.masks, strict=True))
    for changed in (other_steps, other_seed):
        for one, two in zip(first, changed, strict=True):
            assert len(one.masks) == len(two.masks)
            assert distinct([mask for _, mask in [*one.masks, *two.masks]])
            assert not same(one.parameters, two.parameters)


def test_masks_of_a_step_do_not_depend_on_earlier_steps() -> None:
    """A resumed run starts with such a step."""
    (_, ranks), *_ = seen_on(TENSOR)
    (resumed,) = zip(*run_on_ranks(2, train_all, [replace(RUNS[TENSOR][0], steps=(2,))]), strict=True)
    for whole, part in zip(ranks, resumed, strict=True):
        last = whole.masks[-len(part.masks) :]
        assert len(part.masks) * 3 == len(whole.masks)
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(part.masks, last, strict=True))


def data_parallel() -> tuple[list[Tensor], list[Tensor], bool]:
    """Return the masks of two replicas, of two shards, and whether evaluation drops nothing."""
    masks = []
    for mesh in ((1, 2, 1, 1), (1, 1, 2, 1)):
        seen = train(Run(Case("gpt2-tied", mesh, layers=(3,)), steps=(0,)))
        masks.append([mask for _, mask in seen.masks])
    case = Case("gpt2-tied", (1, 1, 2, 1), layers=(3,))
    return masks[0], masks[1], _evaluates_without_dropout(start(case, model=Run(case).model))


def _evaluates_without_dropout(pipeline: Pipeline) -> bool:
    seen: list[Any] = []
    with watched_dropout(seen):
        batch = smallest_part(pipeline, batches()[0])
        first, second = (evaluate(build_step_context(pipeline), [batch]) for _ in range(2))
    return not seen and first == second and pipeline.stages[0].model.training


def test_data_parallel_processes_draw_their_own_masks() -> None:
    (replica, shard, quiet), (other_replica, other_shard, other_quiet) = run_on_ranks(2, data_parallel)
    assert distinct([*replica, *other_replica])
    assert distinct([*shard, *other_shard])
    assert quiet
    assert other_quiet


def states_at_attention(model: str) -> list[bytes]:
    """Return the state of the random stream at each call of torch's fused attention."""
    states: list[bytes] = []
    original = nn.functional.scaled_dot_product_attention

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        assert kwargs["dropout_p"] > 0
        states.append(torch.get_rng_state().numpy().tobytes())
        return original(*args, **kwargs)

    nn.functional.scaled_dot_product_attention = attend
    try:
        train(Run(Case(model, TENSOR, layers=LAYERS[TENSOR]), "sdpa", steps=(0,)))
    finally:
        nn.functional.scaled_dot_product_attention = original
    return states


def test_fused_attention_drops_differently_on_different_processes() -> None:
    one, other = run_on_ranks(2, states_at_attention, "llama-untied")
    assert len({*one, *other}) == 2 * len(one) == 2 * 3 * 2, "three layers and two microbatches on each process"


def draw_from_both_streams() -> tuple[list[float], list[float], list[float]]:
    torch.manual_seed(11)
    streams, own, shared = Streams(dist.get_rank()), [], []
    with streams.of(is_cut=True):
        # The number of draws is different on each rank, and must not affect the shared stream.
        own += torch.rand(3 + dist.get_rank()).tolist()
        with streams.of(is_cut=False):
            shared += torch.rand(2).tolist()
            with streams.of(is_cut=True):
                own += torch.rand(2).tolist()
        with streams.of(is_cut=True):
            own += torch.rand(2).tolist()
        with streams.of(is_cut=False):
            shared += torch.rand(2).tolist()
            before = streams.replayed(lambda: torch.rand(3).tolist())
            state = torch.get_rng_state()
            again = before()
    shared += torch.rand(2).tolist()
    # A recomputation begins with the state of the forward pass, and may end in any state.
    torch.set_rng_state(state)
    assert before() == again
    streams.begin()
    return own, shared, again


def test_shared_and_own_streams_alternate() -> None:
    (own, shared, again), (other_own, other_shared, other_again) = run_on_ranks(2, draw_from_both_streams)
    assert (shared, again) == (other_shared, other_again)
    assert len({*own, *other_own, *shared, *again}) == 7 + 8 + 6 + 3


# One class for each way in which attention may draw, with the smallest change of its defaults.
SHARED_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 1}
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "whole attention": ("olmo2", {}, {}),
    "whole attention, parts of the sequence, recomputed": ("olmo2", {}, {"sequence_parallel": True}),
    "latent attention, whole": ("deepseek_v3", {}, {}),
    "latent attention, cut": ("deepseek_v2", {}, {}),
    "latent attention, cut, parts of the sequence, recomputed": ("deepseek_v2", {}, {"sequence_parallel": True}),
    "attention sinks": ("gpt_oss", {}, {}),
    "shared key-value heads": ("llama", SHARED_HEADS, {}),
    "cut heads, parts of the sequence, recomputed": ("llama", {}, {"sequence_parallel": True}),
    "attention of the class itself": ("bloom", {}, {}),
}


def proof_case(way: str) -> ProofCase:
    model_type, values, switches = WAYS[way]
    config = default_config(model_type)
    config.update(values)
    plan = with_family(ParallelPlan(tensor=TensorPlan()), model_type)
    recompute = RecomputePlan(mode="full" if switches else "none")
    plan = plan.model_copy(update={"tensor": plan.tensor.model_copy(update=switches), "recompute": recompute})
    return with_dropout(make_case(config, plan, MeshPlan(dp_shard=1, tp=2), attention="eager", pretrained=True))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_with_dropout_are_derivatives_of_the_loss(way: str) -> None:
    """`meshtrain verify --models` proves every class so; `measure` raises if replicas differ."""
    error, other = run_on_ranks(2, measure, proof_case(way), timeout=300.0)
    assert error == other
    assert error < 1e-7


def test_keys_are_the_same_in_every_release() -> None:
    """A checkpoint of an earlier release must resume with the same masks."""
    assert stream_key(0, 1, 2, 3, 4) == 5872325335648923821
    assert stream_key("a") != stream_key("b")
    assert stream_key(1, 23) != stream_key(12, 3)
    assert all(0 <= stream_key(number) < 2**63 for number in range(100))
