"""Invariants after any number of steps on any mesh, and a wrong plan that breaks one of them."""

from collections import Counter
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshtrain.config.run import ModelConfig
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.models.fused import join_parts
from meshtrain.models.layout import local_tensor
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.tensor import rules
from meshtrain.runtime.mesh import data_rank, init_mesh
from meshtrain.verify.parallel import build_step_context
from tests.parallel.steps import take_step
from tests.parity import MODELS, Case, batches, build
from tests.ranks import run_on_ranks

CASES = [
    Case("gpt2-tied", (2, 1, 1, 2), sequence_parallel=True),
    Case("gpt2-odd", (1, 1, 2, 2), loss_parallel=False),
    Case("llama-untied", (1, 2, 1, 2), sequence_parallel=True, recompute=1),
    Case("qwen3", (2, 1, 1, 2), "Interleaved1F1B", 2),
    Case("qwen3", (1, 2, 2, 1), reshard="always"),
    Case("llama-tied", (4, 1, 1, 1), "GPipe"),
]
Q_NORM = "model.layers.*.self_attn.q_norm"


@dataclass
class Held:
    """The tensors of one process after training.

    Attributes:
        part: its stages, and its part of sharded tensors.
        data_rank: its part of each batch.
        owned: stock names of the parameters that it would save.
        whole: full parameters by name.
        shards: local parts of the others.
    """

    part: tuple[int, ...]
    data_rank: int
    owned: list[str]
    whole: dict[str, Tensor]
    shards: dict[str, Tensor]


def train(pipeline: Pipeline) -> Held:
    pipeline.initialize(0)
    context = build_step_context(pipeline)
    for step, batch in enumerate(batches()):
        take_step(context, step, batch)
    whole, shards = {}, {}
    for name, parameter in pipeline.named_parameters():
        is_whole = not isinstance(parameter, DTensor) or all(p.is_replicate() for p in parameter.placements)
        (whole if is_whole else shards)[name] = local_tensor(parameter.detach()).clone()
    return Held(
        part=tuple(stage.index for stage in pipeline.stages),
        data_rank=data_rank(pipeline.mesh),
        owned=list(join_parts(dict.fromkeys(pipeline.owned_parameters(), torch.zeros(1, 1)), pipeline.fused)),
        whole=whole,
        shards=shards,
    )


def train_all() -> list[Held]:
    return [train(build(case)) for case in CASES]


def test_replicas_are_equal_and_every_stock_parameter_is_held() -> None:
    for case, ranks in zip(CASES, zip(*run_on_ranks(4, train_all), strict=True), strict=True):
        stock = build_meta_model(load_hf_config(MODELS[case.model]), dtype=torch.float64)
        expected = [name for name, _ in stock.named_parameters()]
        by_part = {part: list(held) for part, held in groupby(ranks, key=lambda held: held.part)}
        pp, _, _, tp = case.mesh
        assert len(by_part) == pp
        saved = Counter(name for held in by_part.values() for name in held[0].owned)
        assert saved == Counter(expected), case
        for held in by_part.values():
            for other in held[1:]:
                assert other.owned == held[0].owned
                assert other.whole.keys() == held[0].whole.keys()
                for name, value in other.whole.items():
                    assert torch.equal(value, held[0].whole[name]), (case, name)
        if case.mesh[:3] == (1, 2, 1):
            # Replicas are bit-equal, too, in the parameters that each shares over tp.
            for one, other in zip(ranks[:tp], ranks[tp:], strict=True):
                assert (one.data_rank, other.data_rank) == (0, 1)
                assert all(torch.equal(one.shards[name], other.shards[name]) for name in one.shards)


def drift() -> dict[str, Tensor]:
    """Train with a head norm whose gradient is not summed, without the check that refuses it."""
    rules._wrong_sums = lambda *_: iter(())
    case = Case("qwen3", (1, 1, 1, 2))
    plan = case.plan()
    styles = {**plan.tensor.styles, Q_NORM: "replicate"}
    plan = plan.model_copy(update={"tensor": plan.tensor.model_copy(update={"styles": styles})})
    config = ModelConfig(type="qwen3", config=MODELS["qwen3"].config)
    stock = build_meta_model(load_hf_config(config), dtype=torch.float64)
    mesh = init_mesh(plan.mesh, "cpu")
    pipeline = build_pipeline(stock, mesh, plan, micro_batch_size=2, seed=0, device=torch.device("cpu"))
    return train(pipeline).whole


def test_norm_without_a_summed_gradient_drifts_apart() -> None:
    """A negative control: it shows that the tests above can detect differences."""
    one, other = run_on_ranks(2, drift)
    assert not any(torch.equal(one[name], other[name]) for name in one if "q_norm" in name)
