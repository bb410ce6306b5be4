"""Linear layers in float8: the products, the layers that use them, and training on meshes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshtrain.compat.fake import name_of
from meshtrain.config.families import with_family
from meshtrain.config.plan import ParallelPlan, PrecisionPlan
from meshtrain.config.run import ModelConfig
from meshtrain.errors import PlanError
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.float8.layers import float8_layers_of
from meshtrain.parallel.float8.product import RECIPES, Recipe, float8_linear
from meshtrain.runtime.mesh import init_mesh
from meshtrain.training.step import StepContext, train_step
from meshtrain.verify.parallel import build_step_context, local_rows
from tests.parity import GLOBAL_BATCH, GPT2, LLAMA, batches
from tests.ranks import run_on_ranks

WIDE = {**LLAMA, "hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2, "tie_word_embeddings": False}
MODELS = {
    "llama": ModelConfig(type="llama", config=WIDE),
    "gpt2": ModelConfig(type="gpt2", config={**GPT2, "n_embd": 64}),
}
FLOAT8: dict[str, Any] = {"compute": "float8", "float8": {"skip": []}}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def whole_numbers(*shape: int, seed: int) -> Tensor:
    """Return numbers from -1 to 1. Float8 holds them and their products exactly."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def gradients(product: Callable[[Tensor, Tensor, Tensor], Tensor], tokens: tuple[int, ...]) -> list[Tensor]:
    """Return the result of a product and the gradients of its input, weight and bias."""
    leaves = [whole_numbers(*tokens, 32, seed=0), whole_numbers(48, 32, seed=1), whole_numbers(48, seed=2)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y = product(*leaves)
    y.backward(whole_numbers(*y.shape, seed=3))
    return [y, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@recipes
@pytest.mark.parametrize("tokens", [(32,), (2, 5), (0,)])
def test_products_and_gradients_are_exact_where_float8_is(recipe: Recipe, tokens: tuple[int, ...]) -> None:
    found = gradients(lambda x, weight, bias: float8_linear(recipe, x, weight, bias), tokens)
    exact = gradients(torch.nn.functional.linear, tokens)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == other.dtype == torch.bfloat16
        assert torch.equal(one, other)


@recipes
def test_a_shard_rounds_as_the_whole_does(recipe: Recipe) -> None:
    stream = torch.Generator().manual_seed(0)
    # Within a factor of 8, nothing is near zero.
    x, weight = (torch.rand(64, 64, generator=stream).mul(7).add(1).bfloat16() for _ in range(2))
    whole = float8_linear(recipe, x, weight)
    shards = [float8_linear(recipe, x, part * 2**power) / 2**power for power, part in enumerate(weight.chunk(2))]
    assert torch.equal(torch.cat(shards, dim=1), whole)


@recipes
def test_what_is_not_finite_stays_so(recipe: Recipe) -> None:
    for value in (float("inf"), float("nan")):
        x = torch.ones(16, 32).bfloat16()
        x[3, 5] = value
        assert not float8_linear(recipe, x, torch.ones(16, 32).bfloat16())[3].isfinite().any()


def plan_of(model_type: str, precision: dict[str, Any] = FLOAT8, **tables: Any) -> ParallelPlan:
    plan = ParallelPlan.model_validate({"mesh": {"dp_shard": 1}, "precision": precision, **tables})
    return with_family(plan, model_type)


def resolved(model: ModelConfig, plan: ParallelPlan) -> tuple[ParallelPlan, Any]:
    """Return the resolved plan of a model, and the model."""
    meta = build_meta_model(load_hf_config(model), dtype=torch.float32)
    return resolve_plan(plan, meta, BatchShape(8, 2, 16), plan.mesh.fixed_degree), meta


def test_first_and_last_layer_stay_in_bfloat16_by_default() -> None:
    plan, model = resolved(MODELS["gpt2"], plan_of("gpt2", {"compute": "float8"}, mesh={"dp_shard": 1, "tp": 2}))
    assert plan.precision.float8.skip == ["transformer.h.0", "transformer.h.3"]
    layers = float8_layers_of(model, plan)
    parts = ("attn.c_attn.q", "attn.c_attn.k", "attn.c_attn.v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert layers.chosen == tuple(f"transformer.h.{layer}.{part}" for layer in (1, 2) for part in parts)
    assert {*layers.others.values()} == {"skipped"}
    assert resolved(MODELS["gpt2"], plan)[0] == plan


def test_layers_whose_shards_do_not_fit_stay_in_bfloat16() -> None:
    model = ModelConfig(type="llama", config={**WIDE, "intermediate_size": 80})
    precision = {"compute": "float8", "float8": {"skip": ["model.layers.*.self_attn.q_proj"]}}
    layers = float8_layers_of(*reversed(resolved(model, plan_of("llama", precision, mesh={"dp_shard": 1, "tp": 2}))))
    assert layers.reasons() == {
        "skipped": ["model.layers.*.self_attn.q_proj"],
        "80 over tp = 2 outputs, not a multiple of 16": [
            "model.layers.*.mlp.gate_proj",
            "model.layers.*.mlp.up_proj",
        ],
        "80 over tp = 2 inputs, not a multiple of 16": ["model.layers.*.mlp.down_proj"],
    }
    assert {name.rpartition(".")[2] for name in layers.chosen} == {"k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("config", "skip", "message"),
    [
        (
            {**WIDE, "hidden_size": 40},
            None,
            "precision.compute = 'float8': no linear layer of the decoder layers can compute in it "
            "(skipped: model.layers.*.self_attn.q_proj, model.layers.*.self_attn.k_proj and 5 more; 40 inputs, not a "
            "multiple of 16: model.layers.*.self_attn.q_proj, model.layers.*.self_attn.k_proj and 4 more; 40 outputs, "
            "not a multiple of 16: model.layers.*.mlp.down_proj); compute in bfloat16, or change precision.float8.skip",
        ),
        (
            WIDE,
            ["model.layers.*.mlp.down"],
            "precision.float8.skip: 'model.layers.*.mlp.down' matches no module of the model; the nearest is "
            "'model.layers.*.mlp.down_proj'",
        ),
    ],
)
def test_models_and_patterns_that_do_not_fit_are_refused(
    config: dict[str, Any], skip: list[str] | None, message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        resolved(
            ModelConfig(type="llama", config=config),
            plan_of("llama", {"compute": "float8", "float8": {} if skip is None else {"skip": skip}}),
        )
    assert caught.value.lines == (message,)


def test_float8_table_needs_float8() -> None:
    with pytest.raises(ValueError, match="`float8` is for `compute` = 'float8', found 'bfloat16'; leave it out, or"):
        PrecisionPlan.model_validate({**FLOAT8, "compute": "bfloat16"})


class Products(TorchDispatchMode):
    """Counts products in float8."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += name_of(func)[1] == "_scaled_mm_v2"
        return func(*args, **(kwargs or {}))


def train(model: str, tables: dict[str, Any]) -> tuple[list[float], int]:
    """Return the losses of two steps, and the number of float8 products of the first."""
    plan, meta = resolved(MODELS[model], plan_of(model, **tables))
    pipeline = build_pipeline(
        meta, init_mesh(plan.mesh, "cpu"), plan, micro_batch_size=2, seed=0, device=torch.device("cpu")
    )
    pipeline.initialize(0)
    context = build_step_context(pipeline)
    with Products() as products:
        losses = [step_on_all_rows(context, 0)]
    return [*losses, step_on_all_rows(context, 1)], products.number


def step_on_all_rows(context: StepContext, step: int) -> float:
    return train_step(context, step, local_rows(context.pipeline, batches()[0]), np.arange(GLOBAL_BATCH)).loss


def train_all(model: str, plans: list[dict[str, Any]]) -> list[tuple[list[float], int]]:
    return [train(model, tables) for tables in plans]


ONE: dict[str, Any] = {}
BFLOAT16: dict[str, Any] = {"precision": {"compute": "bfloat16"}}
TENSORWISE: dict[str, Any] = {"precision": {"compute": "float8", "float8": {"skip": [], "recipe": "tensorwise"}}}


def test_recomputation_repeats_products_only_where_it_should() -> None:
    plans = [
        BFLOAT16,
        ONE,
        {"recompute": {"mode": "full"}},
        {"recompute": {"mode": "selective"}},
        {"compile": {"enabled": True, "backend": "aot_eager"}, **TENSORWISE},
        {"loss": {"chunk_tokens": 5}},
    ]
    ((bfloat16, *found),) = run_on_ranks(1, train_all, "llama", plans)
    plain = found[0][0]
    # 7 linear layers in 4 decoder layers, and 4 microbatches.
    products = 7 * 4 * 4
    assert [number for _, number in found] == [3 * products, 4 * products, 3 * products, 3 * products, 3 * products]
    assert bfloat16[1] == 0
    assert found[1][0] == found[2][0] == plain
    for losses, _ in found:
        assert losses == pytest.approx(bfloat16[0], rel=0.01)
        assert losses != bfloat16[0]


@pytest.mark.parametrize("model", MODELS)
def test_meshes_learn_as_one_process_in_bfloat16(model: str) -> None:
    ((wanted, _),) = run_on_ranks(1, train_all, model, [BFLOAT16])[0]
    schedule = {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}
    plans = [
        {
            "mesh": {"pp": 2, "tp": 2, "dp_shard": 1},
            "pipeline": schedule,
            "tensor": {"sequence_parallel": model == "llama"},
        },
        {"mesh": {"dp_shard": 2, "tp": 2}, **TENSORWISE},
        {"mesh": {"cp": 2, "dp_shard": 2}},
    ]
    for found in run_on_ranks(4, train_all, model, plans):
        for losses, number in found:
            assert number > 0
            assert losses == pytest.approx(wanted, rel=0.01)
