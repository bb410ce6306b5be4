"""Rules that are derived from what a model computes, for classes that nobody wrote rules for."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshtrain
from meshtrain.models.build import build_meta_model, stock_like
from meshtrain.parallel.tensor.dataflow import DerivedRules, derive_rules
from meshtrain.parallel.tensor.dataflow.blocks import Part, find_cuts
from meshtrain.parallel.tensor.dataflow.reach import Reach
from tests.api.programs import full_parameters, make_adam
from tests.parallel.families import Family
from tests.parallel.own_class import make_own
from tests.ranks import run_on_ranks


def rules_of(model_type: str, **config: Any) -> DerivedRules:
    hf_config = Family(model_type, config).hf_config()
    return derive_rules(build_meta_model(hf_config, dtype=torch.float32, attention="eager"))


def eye(size: int, times: int = 1) -> torch.Tensor:
    return torch.eye(size, dtype=torch.bool).repeat_interleave(times, 0)


def test_rules_of_a_class_without_a_plan() -> None:
    rules = rules_of("bert", is_decoder=True)
    layer = "bert.encoder.layer.*."
    assert rules.styles == {
        f"{layer}attention.self.query": "colwise",
        f"{layer}attention.self.key": "colwise",
        f"{layer}attention.self.value": "colwise",
        f"{layer}attention.output.dense": "rowwise",
        f"{layer}intermediate.dense": "colwise",
        f"{layer}output.dense": "rowwise",
    }


def test_fused_projections_and_counts_are_found() -> None:
    rules = rules_of("gpt2", n_embd=32, n_head=4, n_layer=2)
    assert rules.fused == {"transformer.h.*.attn.c_attn": ["first", "second", "third"]}
    assert rules.local_attributes == {"transformer.h.*.attn": ["split_size"]}


def test_own_class_has_rules() -> None:
    rules = derive_rules(stock_like(make_own()))
    assert rules.styles == {
        "stack.*.mixer.asks": "colwise",
        "stack.*.mixer.offers": "replicated_with_grad_allreduce",
        "stack.*.mixer.gives": "colwise",
        "stack.*.mixer.binds": "rowwise",
        "stack.0.mixer": "local_params",
        "stack.2.mixer": "local_params",
        "stack.*.mixer.scale": "colwise",
        "stack.*.wide.both.first": "colwise",
        "stack.*.wide.both.second": "colwise",
        "stack.*.wide.back": "rowwise",
        **{f"stack.*.mixer.all.{part}": "colwise" for part in ("first", "second", "third")},
        "stack.*.mixer.out": "rowwise",
    }
    assert rules.local_attributes == {
        "stack.0.mixer": ["count"],
        "stack.1.mixer": ["heads"],
        "stack.2.mixer": ["count"],
        "stack.3.mixer": ["heads"],
    }


@pytest.mark.parametrize(
    ("twin", "whole"),
    [("mix across heads", {"asks", "gives", "binds"}), ("norm over the width", {"both", "back"})],
)
def test_what_mixes_blocks_stays_whole(twin: str, whole: set[str]) -> None:
    styles = derive_rules(stock_like(make_own(twin))).styles
    assert styles
    assert not {part for pattern in styles for part in pattern.split(".")} & whole


def train_own(mesh: dict[str, int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of three steps, and the parameters that this process holds."""
    model: Any = make_own()
    if mesh:
        model = meshtrain.parallelize(model, {"mesh": mesh}, prove_unknown_class=False)
    optimizer = make_adam(model)
    stream = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(3):
        ids = torch.randint(64, (2, 12), generator=stream)
        optimizer.zero_grad()
        if isinstance(model, torch.nn.Module):
            loss = F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
        else:
            loss = model.forward_backward({"input_ids": ids, "labels": ids})
        optimizer.step()
        losses.append(loss.item())
    found = full_parameters(model) if mesh else {name: p.detach() for name, p in model.named_parameters()}
    return losses, {name: value.clone() for name, value in found.items()}


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_own_class_trains_like_the_stock_model(mesh: dict[str, int]) -> None:
    losses, parameters = train_own({})
    held: set[str] = set()
    for found, own in run_on_ranks(2 * len(mesh), train_own, mesh):
        assert found == pytest.approx(losses, rel=1e-12)
        for name, value in own.items():
            torch.testing.assert_close(value, parameters[name], rtol=0, atol=1e-12)
        held |= own.keys()
    assert held == parameters.keys()


def test_features_that_reach_all_blocks_are_shared() -> None:
    hits = torch.cat([eye(4, 2), torch.ones(3, 4, dtype=torch.bool)])
    (cut,) = find_cuts({"row": Reach(inputs=4, outputs={"column": hits})}, {"column": torch.zeros(11).bool()})
    assert cut.blocks == 4
    assert cut.columns == {"column": (Part(8, "cut"), Part(3, "shared"))}
    assert cut.rows == ("row",)


@pytest.mark.parametrize(
    ("hits", "outside"),
    [
        (torch.ones(4, 4, dtype=torch.bool), []),
        (eye(4), [1]),
        (eye(3), []),
        (eye(4)[[0, 2, 1, 3]], []),
    ],
    ids=["joint", "used outside", "odd number of blocks", "another order"],
)
def test_what_cannot_be_cut(hits: torch.Tensor, outside: list[int]) -> None:
    used = torch.zeros(len(hits)).bool()
    used[outside] = True
    assert not [*find_cuts({"row": Reach(inputs=hits.shape[1], outputs={"column": hits})}, {"column": used})]


def test_projection_in_the_middle_is_cut_once() -> None:
    reached = {
        "second": Reach(inputs=4, outputs={"first": eye(4)}),
        "third": Reach(inputs=4, outputs={"second": eye(4)}),
    }
    none = torch.zeros(4).bool()
    (cut,) = find_cuts(reached, {"first": none, "second": none})
    assert (*cut.columns, *cut.rows) == ("first", "second")
