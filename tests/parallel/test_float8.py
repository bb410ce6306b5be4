"""Linear layers in float8: the products, the layers that use them, and training on meshes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshtrain.compat.fake import fake_tensors
from meshtrain.compat.operators_seen import name_of
from meshtrain.config.families import with_family
from meshtrain.config.plan import Float8Recipe, ParallelPlan, PrecisionPlan
from meshtrain.config.run import ModelConfig
from meshtrain.errors import PlanError
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.float8.layers import float8_layers_of
from meshtrain.parallel.float8.product import E4M3, E5M2, RECIPES, Recipe, _swizzled, float8_linear, products_as_on_gpus
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
EXPERTS = ModelConfig(type="mixtral", config={**WIDE, "num_local_experts": 4})
FLOAT8: dict[str, Any] = {"compute": "float8", "float8": {"skip": []}}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def whole_numbers(*shape: int, seed: int) -> Tensor:
    """Return numbers from -1 to 1. Float8 holds them and their products exactly."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def gradients(product: Callable[[Tensor, Tensor, Tensor], Tensor], tokens: tuple[int, ...]) -> list[Tensor]:
    """Return the result of a product and the gradients of its input, weight and bias."""
    leaves = [whole_numbers(*tokens, 32, seed=0), whole_numbers(64, 32, seed=1), whole_numbers(64, seed=2)]
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
@pytest.mark.parametrize("tokens", [(32,), (2, 5)])
def test_results_may_be_changed_in_place(recipe: Recipe, tokens: tuple[int, ...]) -> None:
    def clamped(product: Callable[..., Tensor]) -> list[Tensor]:
        return gradients(lambda *factors: product(*factors[:2]).clamp_(-1.0, 1.0) * factors[2], tokens)

    found = clamped(lambda x, weight: float8_linear(recipe, x, weight))
    for one, other in zip(found, clamped(torch.nn.functional.linear), strict=True):
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


def test_blocks_have_scales_of_their_own() -> None:
    # Each block of 32 holds one power of two, which is exact; so far apart, a row loses the small.
    x = torch.cat([torch.full((32, 32), 2.0**power) for power in (0, -20)], dim=1).bfloat16()
    weight = torch.cat([torch.zeros(32, 32), torch.ones(32, 32)], dim=1).bfloat16()
    assert torch.equal(float8_linear(RECIPES["mxfp8"], x, weight), torch.full((32, 32), 2.0**-15).bfloat16())
    assert torch.equal(float8_linear(RECIPES["rowwise"], x, weight), torch.zeros(32, 32).bfloat16())


@recipes
@pytest.mark.parametrize("frozen", [0, 1], ids=["input", "weight"])
def test_gradient_of_one_factor_is_that_beside_the_other(recipe: Recipe, frozen: int) -> None:
    stream = torch.Generator().manual_seed(0)
    values = [torch.randn(64, 32, generator=stream).bfloat16() for _ in range(2)]
    together = [it.clone().requires_grad_() for it in values]
    alone = [it.clone().requires_grad_(index != frozen) for index, it in enumerate(values)]
    for x, weight in (together, alone):
        (float8_linear(recipe, x, weight) ** 2).sum().backward()
    assert alone[frozen].grad is None
    assert alone[1 - frozen].grad is not None
    assert torch.equal(alone[1 - frozen].grad, together[1 - frozen].grad)


@pytest.mark.parametrize("name", ["rowwise", "tensorwise"])
def test_a_product_is_compiled_as_one_graph(name: Float8Recipe) -> None:
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return float8_linear(RECIPES[name], x, weight)

    stream = torch.Generator().manual_seed(0)
    values = [torch.randn(64, 32, generator=stream).bfloat16() for _ in range(2)]
    found = []
    with products_as_on_gpus():
        for function in (product, torch.compile(product, backend="aot_eager", fullgraph=True)):
            leaves = [it.clone().requires_grad_() for it in values]
            y = function(*leaves)
            y.sum().backward()
            found.append([y, *(leaf.grad for leaf in leaves)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_no_value_of_a_block_is_cut_off() -> None:
    # 508 is above the largest value 448 of e4m3, and half of it is not.
    x = torch.full((32, 32), 508.0).bfloat16()
    assert float8_linear(RECIPES["mxfp8"], x, torch.eye(32).bfloat16()).eq(512).all()


def test_kernel_for_blocks_finds_each_scale_where_cublas_reads_it() -> None:
    scales = torch.randint(-100, 100, (150, 6), generator=torch.Generator().manual_seed(0)).float().exp2()
    found = _swizzled(scales).float()
    # Two tiles of rows and two of blocks, filled up.
    assert found.numel() == 2 * 2 * 128 * 4
    for row in range(150):
        for block in range(6):
            tile = row // 128 * 2 + block // 4
            at = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            assert found[at] == scales[row, block]


class Kernels(TorchDispatchMode):
    """Counts calls of torch's kernel."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += name_of(func)[1] == "_scaled_mm"
        return func(*args, **(kwargs or {}))


@recipes
def test_gpus_multiply_with_the_kernel_of_torch(recipe: Recipe) -> None:
    with fake_tensors(), products_as_on_gpus(), Kernels() as kernels:
        x, weight = (torch.empty(96, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        float8_linear(recipe, x, weight).sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        assert x.grad.shape == weight.grad.shape == (96, 64)
    assert kernels.number == 3


@pytest.mark.parametrize("name", ["rowwise", "tensorwise"])
def test_a_cpu_computes_what_the_kernel_of_torch_computes(name: Float8Recipe) -> None:
    stream = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(64, 96, generator=stream).bfloat16() for _ in range(2))
    with products_as_on_gpus():
        kernel = float8_linear(RECIPES[name], x, weight)
    assert torch.allclose(float8_linear(RECIPES[name], x, weight), kernel, rtol=2**-7, atol=2**-9)


def plan_of(model_type: str, precision: dict[str, Any] = FLOAT8, **tables: Any) -> ParallelPlan:
    plan = ParallelPlan.model_validate({"mesh": {"dp_shard": 1}, "precision": precision, **tables})
    return with_family(plan, model_type)


def resolved(model: ModelConfig, plan: ParallelPlan, *, rows: int = 8) -> tuple[ParallelPlan, Any]:
    """Return the resolved plan of a model, and the model."""
    meta = build_meta_model(load_hf_config(model), dtype=torch.float32)
    return resolve_plan(plan, meta, BatchShape(rows, 2, 16), plan.mesh.fixed_degree), meta


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


def test_blocks_need_twice_the_width() -> None:
    precision = {"compute": "float8", "float8": {"recipe": "mxfp8", "skip": []}}
    config = {**WIDE, "intermediate_size": 80}
    layers = float8_layers_of(
        *reversed(resolved(ModelConfig(type="llama", config=config), plan_of("llama", precision)))
    )
    assert layers.reasons() == {
        "80 outputs, not a multiple of 32": ["model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"],
        "80 inputs, not a multiple of 32": ["model.layers.*.mlp.down_proj"],
    }


def test_float8_table_needs_float8() -> None:
    with pytest.raises(ValueError, match="`float8` is for `compute` = 'float8', found 'bfloat16'; leave it out, or"):
        PrecisionPlan.model_validate({**FLOAT8, "compute": "bfloat16"})


class Products(TorchDispatchMode):
    """Counts matrix products, and casts of their factors to float8."""

    number, casts = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.number += name_of(func)[1] == "mm"
        self.casts += name_of(func)[1] == "_to_copy" and result.dtype in (E4M3, E5M2)
        return result


class Trained(NamedTuple):
    """The losses of two steps, and what the first one computed."""

    losses: list[float]
    products: int
    casts: int


def train(model: str, tables: dict[str, Any]) -> Trained:
    plan, meta = resolved({**MODELS, "mixtral": EXPERTS}[model], plan_of(model, **tables))
    pipeline = build_pipeline(
        meta, init_mesh(plan.mesh, "cpu"), plan, micro_batch_size=2, seed=0, device=torch.device("cpu")
    )
    pipeline.initialize(0)
    context = build_step_context(pipeline)
    with Products() as products:
        losses = [step_on_all_rows(context, 0)]
    return Trained([*losses, step_on_all_rows(context, 1)], products.number, products.casts)


def step_on_all_rows(context: StepContext, step: int) -> float:
    return train_step(context, step, local_rows(context.pipeline, batches()[0]), np.arange(GLOBAL_BATCH)).loss


def train_all(model: str, plans: list[dict[str, Any]]) -> list[Trained]:
    return [train(model, tables) for tables in plans]


ONE: dict[str, Any] = {}
BFLOAT16: dict[str, Any] = {"precision": {"compute": "bfloat16"}}
MXFP8: dict[str, Any] = {"precision": {"compute": "float8", "float8": {"skip": [], "recipe": "mxfp8"}}}
TENSORWISE: dict[str, Any] = {"precision": {"compute": "float8", "float8": {"skip": [], "recipe": "tensorwise"}}}


def test_recomputation_repeats_products_only_where_it_should() -> None:
    plans = [
        BFLOAT16,
        ONE,
        {"recompute": {"mode": "full"}},
        {"recompute": {"mode": "selective"}},
        {"compile": {"enabled": True, "backend": "aot_eager"}, **TENSORWISE},
        {"loss": {"chunk_tokens": 5}},
        MXFP8,
    ]
    ((bfloat16, *found),) = run_on_ranks(1, train_all, "llama", plans)
    plain, full, selective, *_ = found
    # 7 linear layers in 4 decoder layers, and 4 microbatches. A product casts two factors.
    number = 7 * 4 * 4
    assert bfloat16.casts == 0
    assert [it.casts / number / 2 for it in found] == [3, 4, 4, 3, 3, 3]
    assert [it.products - bfloat16.products for it in (plain, full, selective)] == [0, number, 0]
    assert full.losses == selective.losses == plain.losses
    for losses in (it.losses for it in found):
        assert losses == pytest.approx(bfloat16.losses, rel=0.01)
        assert losses != bfloat16.losses


@pytest.mark.parametrize("model", MODELS)
def test_meshes_learn_as_one_process_in_bfloat16(model: str) -> None:
    (wanted,) = run_on_ranks(1, train_all, model, [BFLOAT16])[0]
    schedule = {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}
    plans = [
        {
            "mesh": {"pp": 2, "tp": 2, "dp_shard": 1},
            "pipeline": schedule,
            "tensor": {"sequence_parallel": model == "llama"},
        },
        {"mesh": {"dp_shard": 2, "tp": 2}, **TENSORWISE},
        {"mesh": {"cp": 2, "dp_shard": 2}},
        {"mesh": {"pp": 2, "tp": 2, "dp_shard": 1}, **MXFP8},
        {"mesh": {"dp_shard": 4}, **MXFP8},
    ]
    for found in run_on_ranks(4, train_all, model, plans):
        for it in found:
            assert it.casts > 0
            assert it.losses == pytest.approx(wanted.losses, rel=0.01)


def test_experts_on_two_processes_learn_as_one_process_in_bfloat16() -> None:
    (wanted,) = run_on_ranks(1, train_all, "mixtral", [BFLOAT16])[0]
    plans = [{"mesh": {"ep": 2, "dp_shard": 1}, **recipe} for recipe in (ONE, TENSORWISE, MXFP8)]
    for found in run_on_ranks(2, train_all, "mixtral", plans):
        for it in found:
            assert it.casts > 0
            assert it.losses == pytest.approx(wanted.losses, rel=0.01)
