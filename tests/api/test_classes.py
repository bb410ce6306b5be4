"""The stock training loop computes the same on a mesh, around models of many kinds."""

import math
from typing import Any, NamedTuple

import pytest
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from meshtrain.api.handle import pipeline_of
from meshtrain.compat.transformers import loop_over_experts
from meshtrain.models.fused import join_parts
from meshtrain.parallel import replicas
from meshtrain.parallel.pipeline import full_tensor
from meshtrain.verify.case import make_batches, with_noise
from meshtrain.verify.reference import build_adamw, build_stock, copy_weights, copy_weights_into
from tests.api.programs import full_parameters, own_part, parallel
from tests.casts import lift_float32_casts
from tests.ranks import run_on_ranks
from tests.tiny import shared_block_config, tiny_config

ROWS, LAYERS = 8, 4
MESHES = ({"tp": 2}, {"pp": 2})
# Several streams, a shared block with a state space, routers, a recurrence, a head of its own.
TYPES = ("gemma3n_text", "zamba2", "hy_v4", "rwkv", "modernbert-decoder")


class Training(NamedTuple):
    """The loss of each step, the gradients of the first, and the parameters after the last."""

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def build(config: PretrainedConfig) -> PreTrainedModel:
    """Build a model in float64 as a program does, in which no value is zero."""
    model = build_stock(config, attention="eager")
    lift_float32_casts()
    copy_weights_into(model, with_noise(copy_weights(model)))
    return model


def full_gradients(model: Any) -> dict[str, Tensor]:
    """Return the gradients of this rank as full tensors, under the stock names."""
    if not hasattr(model, "num_data_ranks"):
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    pipeline = pipeline_of(model)
    owned = pipeline.owned_parameters().items()
    ours = {name: full_tensor(p.grad).clone() for name, p in owned if p.grad is not None}
    return join_parts(ours, pipeline.fused)


def train(model: Any) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = build_adamw([*model.parameters()])
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for batch in make_batches(model.config.get_text_config().vocab_size, ROWS, "joined"):
        optimizer.zero_grad()
        part = own_part(model, batch) if hasattr(model, "num_data_ranks") else batch
        if isinstance(model, PreTrainedModel):
            loss = model(**part, use_cache=False).loss
            loss.backward()
        else:
            loss = model.forward_backward(part)
        first = first or full_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    return losses, first


def train_stock(configs: list[PretrainedConfig]) -> list[Training]:
    models = [build(config) for config in configs]
    return [Training(*train(model), copy_weights(model)) for model in models]


def train_parallel(
    configs: list[PretrainedConfig], mesh: dict[str, int], tables: dict[str, Any] | None = None
) -> list[Training]:
    replicas.LARGE = 64
    models = [parallel(build(config), mesh, **(tables or {})) for config in configs]
    return [Training(*train(model), full_parameters(model)) for model in models]


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in found.items():
        scale = max(1e-3, wanted[name].abs().max().item())
        assert (value - wanted[name]).abs().max().item() <= 1e-12 * scale, name


def test_stock_loop_computes_the_same_around_many_classes() -> None:
    configs = [tiny_config(model_type, LAYERS) for model_type in TYPES]
    for config in configs:
        loop_over_experts(config)
    wanted = run_on_ranks(1, train_stock, configs)[0]
    for mesh in MESHES:
        answers = run_on_ranks(2, train_parallel, configs, mesh)
        for number, stock in enumerate(wanted):
            names: set[str] = set()
            for found in (rank[number] for rank in answers):
                assert found.losses == pytest.approx(stock.losses, rel=1e-12, abs=0), (TYPES[number], mesh)
                assert_equal(found.gradients, stock.gradients)
                assert_equal(found.parameters, stock.parameters)
                names |= found.parameters.keys()
            assert names == stock.parameters.keys()


@pytest.mark.parametrize("shard", [{}, {"prefetch": 1}], ids=str)
def test_layers_that_share_a_block_are_sharded_together(shard: dict[str, int]) -> None:
    config = shared_block_config()
    (stock,) = run_on_ranks(1, train_stock, [config])[0]
    (held,) = [name for name in stock.parameters if name.endswith("shared_transformer.self_attn.o_proj.weight")]
    assert held.startswith("model.layers.1.")
    for (found,) in run_on_ranks(2, train_parallel, [config], {"dp_shard": 2}, {"shard": shard}):
        assert found.losses == pytest.approx(stock.losses, rel=1e-12, abs=0)
        assert_equal(found.gradients, stock.gradients)
        assert_equal(found.parameters, stock.parameters)
        assert found.parameters.keys() == stock.parameters.keys()


@pytest.mark.parametrize("mesh", [{"ep": 2}, {"pp": 2, "ep": 2}], ids=str)
def test_tokens_travel_to_the_experts_of_other_ranks(mesh: dict[str, int]) -> None:
    config = tiny_config("mixtral", LAYERS)
    loop_over_experts(config)
    (stock,) = run_on_ranks(1, train_stock, [config])[0]
    names: set[str] = set()
    for (found,) in run_on_ranks(math.prod(mesh.values()), train_parallel, [config], mesh):
        assert found.losses == pytest.approx(stock.losses, rel=1e-12, abs=0)
        assert_equal(found.gradients, stock.gradients)
        assert_equal(found.parameters, stock.parameters)
        names |= found.parameters.keys()
    assert names == stock.parameters.keys()
