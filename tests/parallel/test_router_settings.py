"""The z-loss of routers and moved biases equal those of one process; what cannot is refused."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshtrain.compat.transformers import router_recorder
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import CompilePlan, ParallelPlan, PrecisionPlan, RecomputePlan, TensorPlan
from meshtrain.config.run import STOCK_ROUTER, CheckpointConfig, LoggingConfig, ModelConfig, RouterConfig, RunConfig
from meshtrain.errors import ConfigError, PlanError
from meshtrain.models.tiny import default_config, shrink
from meshtrain.parallel.check import resolve_plan
from meshtrain.parallel.check.routers import _check_biases, check_expert_tokens
from meshtrain.parallel.experts.stacks import expert_stacks, selection_biases
from meshtrain.parallel.experts.use import countable_stacks
from meshtrain.parallel.routers.formulas import find_routers, z_loss
from meshtrain.training.resolve import resolve_run
from meshtrain.verify.case import ProofCase
from meshtrain.verify.prove import prove_together, quiet_ranks
from meshtrain.verify.reference import build_stock
from tests.parallel.test_context import BATCH, case_of, meta_model
from tests.parallel.test_experts import run_of, train
from tests.training.runs import steps_of

BOTH = RouterConfig(z_loss=0.3, bias_update_rate=0.01)
Z_LOSS, BALANCED = RouterConfig(z_loss=0.3), RouterConfig(bias_update_rate=0.01)
# The auxiliary loss beside the z-loss.
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
# Their biases are frozen parameters; those of all others are buffers.
WITH_PARAMETERS = {"afmoe", "ernie4_5_moe", "laguna"}


def assert_proven(*cases: ProofCase) -> None:
    for case, proof in zip(cases, prove_together(list(cases)), strict=True):
        assert proof.difference is None, case.architecture
        kinds = {finding.what for finding in proof.findings}
        assert "router z-loss" in kinds
        has_biases = case.hf_config.model_type not in {*WITH_PARAMETERS, "mixtral", "qwen3_moe"}
        assert ("router bias" in kinds) == has_biases


def asking(router: RouterConfig, *arguments: Any, **tables: Any) -> ProofCase:
    return replace(case_of(*arguments, **tables), router=router)


def test_one_process_computes_what_the_stock_model_does() -> None:
    assert_proven(
        asking(BOTH, "deepseek_v3", {}, "padded"),
        asking(BOTH, "laguna", {}, recompute={"mode": "full"}),
        asking(Z_LOSS, "mixtral", {}, "padded", config=ROUTED),
        asking(Z_LOSS, "qwen3_moe", {}, "bucketed"),
        # The layers break where tokens are counted. Recomputed, their blocks are compiled apart.
        asking(BOTH, "deepseek_v3", {}, compile={"enabled": True}),
        asking(BOTH, "deepseek_v3", {}, compile={"enabled": True}, recompute={"mode": "full"}),
    )


@pytest.mark.parametrize("mesh", [{"ep": 2}, {"tp": 2}, {"pp": 2}, {"dp_shard": 2}, {"cp": 2}], ids=str)
def test_plans_compute_what_one_process_does(mesh: dict[str, int]) -> None:
    split = {"sequence_parallel": True} if "tp" in mesh else {}
    assert_proven(
        asking(BOTH, "deepseek_v3", mesh, "padded", tensor=split),
        # Biases that are parameters are cut by FSDP2.
        asking(BOTH, "ernie4_5_moe", mesh, "padded"),
        asking(Z_LOSS, "mixtral", mesh, "padded", config=ROUTED, recompute={"mode": "full"}),
    )


def tiny(kind: str) -> Any:
    # Grouped matrix products do not compute in float64.
    return build_stock(shrink(default_config(kind), 4), attention="eager").float()


OTHER_KINDS = {
    *("deepseek_v2", "deepseek_v3", "dots1", "gpt_oss", "hy_v3", "jamba", "kimi_linear", "laguna", "mimo_v2_flash"),
    *("minimax", "minimax_m2", "mixtral", "nemotron_h", "qwen3_next", "solar_open"),
}


def kinds_with_experts() -> dict[str, nn.Module]:
    kinds = {}
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if "moe" not in kind and kind not in OTHER_KINDS:
            continue
        model = tiny(kind)
        if expert_stacks(model):
            kinds[kind] = model
    return kinds


def test_classes_select_by_biases_and_return_logits() -> None:
    selecting = set()
    with quiet_ranks(), torch.no_grad():
        for kind, model in kinds_with_experts().items():
            recorder = router_recorder(model)
            assert recorder is not None, kind
            found = _run_changed(model.eval(), recorder)
            for logits in found["logits"]:
                # Softmax would have given a sum of exponentials of another size.
                assert z_loss(logits, None).item() == pytest.approx(math.log(logits.shape[-1]) ** 2), kind
            if selection_biases(model):
                selecting.add(kind)
                assert found["chosen"], kind
                assert all((chosen == 1).any(-1).all() for chosen in found["chosen"]), kind
    assert {"deepseek_v3", "glm4_moe", "minimax_m2", "lfm2_moe", "hy_v3", *WITH_PARAMETERS} <= selecting


def _run_changed(model: Any, recorder: Any) -> dict[str, list[Tensor]]:
    """Return the logits of routers without weights, and what they choose if expert 1 is favored."""
    found: dict[str, list[Tensor]] = {"logits": [], "chosen": []}

    def keep_logits(module: nn.Module, args: Any, output: Any) -> None:
        found["logits"].append(output[recorder.index] if isinstance(output, tuple) else output)

    def keep_chosen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _, chosen, *_ = (*args, *kwargs.values())
        found["chosen"].append(chosen)

    biases = selection_biases(model)
    for _, router in find_routers(model, recorder):
        for parameter in router.parameters():
            parameter.zero_()
        router.register_forward_hook(keep_logits)
    for name, (module, bias) in biases.items():
        getattr(module, bias).view(-1)[1] = 100.0
        model.get_submodule(name).register_forward_pre_hook(keep_chosen, with_kwargs=True)
    model(torch.arange(8)[None] % 7, use_cache=False)
    return found


def problems_of(
    kind: str, router: RouterConfig, config: dict[str, Any] | None = None, **tables: Any
) -> tuple[str, ...]:
    plan = ParallelPlan(**{"mesh": MeshPlan(dp_shard=1), **tables})
    with pytest.raises(PlanError) as caught:
        resolve_plan(plan, meta_model(kind, **config or {}), BATCH, plan.mesh.world_size, router=router)
    return caught.value.lines


def test_what_a_class_lacks_is_refused() -> None:
    assert problems_of("llama", BOTH) == (
        "router.z_loss = 0.3 asks for losses of the routers, but this LlamaForCausalLM has no router that is known "
        "here; leave router.z_loss out",
        "router.bias_update_rate = 0.01, but the model is a LlamaForCausalLM, which has no stacked experts; leave it "
        "out",
    )
    assert problems_of("mixtral", RouterConfig(bias_update_rate=0.01)) == (
        "router.bias_update_rate = 0.01, but the model is a MixtralForCausalLM, whose routers have no bias to select "
        "experts with; leave it out",
    )
    part = TensorPlan(styles={"model.layers.*.mlp.gate": "sequence_parallel"}, auto=True, sequence_parallel=True)
    assert problems_of("mixtral", Z_LOSS, mesh=MeshPlan(dp_shard=1, tp=2), tensor=part) == (
        "tensor.styles: model.layers.*.mlp.gate is 'sequence_parallel', but router.z_loss = 0.3 asks for losses of the "
        "routers, and every process needs the logits of whole microbatches for them; make it 'replicate', or leave "
        "router.z_loss out",
    )


def test_both_losses_are_named_where_neither_is_possible() -> None:
    config = {**ROUTED, "mlp_only_layers": [0, 1], "num_hidden_layers": 2}
    assert problems_of("qwen3_moe", Z_LOSS, config=config) == (
        "model.config.output_router_logits = True and router.z_loss = 0.3 ask for losses of the routers, but this "
        "Qwen3MoeForCausalLM has no router that is known here; set output_router_logits to false and leave "
        "router.z_loss out",
    )


def test_experts_on_a_part_of_the_tokens_are_neither_counted_nor_balanced() -> None:
    block = "model.layers.*.mlp"
    model = meta_model("deepseek_v3", first_k_dense_replace=0, num_hidden_layers=1)
    (problem,) = _check_biases(BALANCED, {"model.layers.0.mlp.experts": "sequence_parallel"}, model, "float32")
    assert str(problem) == (
        f"tensor.styles: {block}.experts is 'sequence_parallel', but for router.bias_update_rate = 0.01 every process "
        "needs the choices of whole microbatches; make it 'moe_tp_experts', or leave that out"
    )
    assert countable_stacks(model, {"model.layers.0.mlp.experts": "sequence_parallel"}) == {}
    assert countable_stacks(model, {"model.layers.0.mlp.experts": "replicate"}) == {"model.layers.0.mlp.experts": 256}


def test_biases_of_other_things_than_experts_are_refused() -> None:
    model = meta_model("deepseek_v3", first_k_dense_replace=0, num_hidden_layers=1)
    gate = model.model.layers[0].mlp.gate
    gate.e_score_correction_bias = torch.empty(3, device="meta")
    (problem,) = _check_biases(BALANCED, {}, model, "float32")
    assert str(problem) == (
        "router.bias_update_rate = 0.01, but model.layers.0.mlp.experts has 3 biases for 256 experts; leave it out"
    )
    del model.model.layers[0].mlp.experts.num_experts
    (problem,) = _check_biases(BALANCED, {}, model, "float32")
    assert "has 3 biases for experts, whose number is not known" in str(problem)


def test_selective_recomputation_of_compiled_layers_is_refused() -> None:
    tables = {"compile": CompilePlan(enabled=True), "recompute": RecomputePlan(mode="selective")}
    assert problems_of("mixtral", Z_LOSS, **tables) == (
        "recompute.mode = 'selective' with compile.enabled and losses or biases of routers: attention and MLP are "
        "then compiled separately, and torch cannot select the results to keep inside them; set recompute.mode = "
        "'full', or compile.enabled = false",
    )


def test_biases_that_lose_small_steps_are_refused() -> None:
    model = meta_model("deepseek_v3").bfloat16()
    plan = ParallelPlan(mesh=MeshPlan(dp_shard=1))
    with pytest.raises(PlanError) as caught:
        resolve_plan(plan, model, BATCH, 1, router=RouterConfig(bias_update_rate=0.001))
    assert caught.value.lines == (
        "router.bias_update_rate = 0.001, but the biases of DeepseekV3ForCausalLM are in bfloat16 here, which would "
        'lose such steps; set precision.parameters = "float32"',
    )


def test_biases_that_routers_get_rounded_are_refused() -> None:
    moved, precision = RouterConfig(bias_update_rate=0.01), PrecisionPlan(compute="bfloat16")
    plan = ParallelPlan(mesh=MeshPlan(dp_shard=1), precision=precision)
    # Those of DeepSeek are buffers, which keep their format.
    resolve_plan(plan, meta_model("deepseek_v3"), BATCH, 1, router=moved)
    (line,) = problems_of("ernie4_5_moe", moved, precision=precision)
    assert line == (
        "router.bias_update_rate = 0.01, but the biases of Ernie4_5_MoeForCausalLM are parameters, which routers get "
        'in bfloat16 here, and which would lose such steps; set precision.compute = "float32"'
    )


def test_routers_that_return_probabilities_are_refused() -> None:
    config = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    (line,) = problems_of("gemma4_text", Z_LOSS, config=config)
    assert line == (
        "router.z_loss asks for a loss of the logits of routers, but what those of Gemma4ForCausalLM return are not "
        "logits, one row per token; leave it out"
    )


def asked_for_each_expert(kind: str, router: RouterConfig = STOCK_ROUTER, **tables: Any) -> str:
    """Return why the tokens of each expert cannot be metrics."""
    plan, model = ParallelPlan(**{"mesh": MeshPlan(dp_shard=1), **tables}), meta_model(kind)
    with pytest.raises(ConfigError) as caught:
        check_expert_tokens(resolve_plan(plan, model, BATCH, plan.mesh.world_size, router=router), model, router)
    (line,) = caught.value.lines
    return line


def test_tokens_of_each_expert_are_refused_where_they_are_not_counted() -> None:
    asks = "logging.expert_tokens asks for the tokens of each expert"
    assert asked_for_each_expert("llama") == (
        f"{asks}, but the model is a LlamaForCausalLM, which has no stacked experts; leave it out"
    )
    assert asked_for_each_expert("mixtral", compile=CompilePlan(enabled=True)) == (
        f"{asks}, but with compile.enabled they are counted only for router.bias_update_rate, because the counts break "
        "the graphs of layers; leave logging.expert_tokens out, or set compile.enabled = false"
    )
    # The experts of the other layers are counted.
    for layer in ("*", "1"):
        part: Any = {f"model.layers.{layer}.mlp.experts": "sequence_parallel"}
        plan = TensorPlan(styles=part, auto=True, sequence_parallel=True)
        assert asked_for_each_expert("mixtral", mesh=MeshPlan(dp_shard=1, tp=2), tensor=plan) == (
            f"tensor.styles: model.layers.*.mlp.experts is 'sequence_parallel', but {asks}, and every process needs "
            "the choices of whole microbatches for them; make it 'moe_tp_experts', or leave logging.expert_tokens out"
        )


@pytest.mark.parametrize("unknown", [1, 2])
def test_tokens_of_experts_without_a_known_number_are_refused(unknown: int) -> None:
    model = meta_model("mixtral")
    for stack in [*expert_stacks(model).values()][:unknown]:
        del stack.num_experts
    refusal = "MixtralForCausalLM, which does not say how many experts each stack has; leave it out"
    with pytest.raises(ConfigError, match=refusal):
        check_expert_tokens(ParallelPlan(), model, STOCK_ROUTER)


def test_run_is_refused_if_it_asks_for_tokens_that_are_not_counted(tmp_path: Path) -> None:
    run = run_of(tmp_path, "compiled", {}, 1, compile=CompilePlan(enabled=True))
    with pytest.raises(
        ConfigError, match=r"logging\.expert_tokens asks for the tokens of each expert, but with compile"
    ):
        resolve_run(run.model_copy(update={"logging": LoggingConfig(expert_tokens=True)}))


def filled(run: RunConfig, form: str, **others: Any) -> RunConfig:
    """Return a run whose last batch of an epoch has rows of padding."""
    data = run.data.model_copy(update={"drop_last": False, "form": form})
    return run.model_copy(update={"data": data, **others})


@pytest.mark.parametrize("form", ["packed", "padded"])
@pytest.mark.parametrize("what", ["loss", "z-loss", "biases"])
def test_routers_that_rows_of_padding_would_train_are_refused(tmp_path: Path, what: str, form: str) -> None:
    run = balanced(tmp_path, "filled", {}, 1) if what == "biases" else run_of(tmp_path, "filled", {}, 1)
    others = {
        "loss": {"model": run.model.model_copy(update={"config": {**run.model.config, "output_router_logits": True}})},
        "z-loss": {"router": RouterConfig(z_loss=0.001)},
        "biases": {"router": RouterConfig(bias_update_rate=0.01)},
    }
    with pytest.raises(ConfigError) as caught:
        resolve_run(filled(run, form, **others[what]))
    assert caught.value.lines == (
        "data.drop_last = false fills the last batch of an epoch with rows of padding, and the losses and biases of "
        "routers would count their tokens; leave it out",
    )


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_rows_of_padding_fill_batches_where_no_router_is_trained(tmp_path: Path, form: str) -> None:
    resolve_run(filled(run_of(tmp_path, "plain", {}, 1), form))


def test_tokens_of_each_expert_are_counted_in_compiled_layers_for_biases() -> None:
    plan = ParallelPlan(mesh=MeshPlan(dp_shard=1, tp=2), compile=CompilePlan(enabled=True))
    model = meta_model("deepseek_v3")
    check_expert_tokens(resolve_plan(plan, model, BATCH, 2, router=BALANCED), model, BALANCED)


def balanced(directory: Path, name: str, mesh: dict[str, int], steps: int, rate: float = 0.01) -> RunConfig:
    run = run_of(directory, name, mesh, steps)
    small = {key: value for key, value in run.model.config.items() if key in DEEPSEEK_NAMES}
    model = ModelConfig(type="deepseek_v3", config={**small, **DEEPSEEK})
    router = RouterConfig(z_loss=0.001, bias_update_rate=rate)
    return run.model_copy(update={"model": model, "router": router, "checkpoint": CheckpointConfig(every=2)})


DEEPSEEK_NAMES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "num_key_value_heads": 4,
}


def test_run_with_biases_resumes_on_other_meshes(tmp_path: Path) -> None:
    train(balanced(tmp_path, "alone", {}, 6))
    train(balanced(tmp_path, "traveling", {"ep": 2}, 2))
    train(balanced(tmp_path, "traveling", {"pp": 2}, 4))
    train(balanced(tmp_path, "traveling", {"dp_shard": 2}, 6))
    wanted, found = (steps_of(tmp_path / name) for name in ("alone", "traveling"))
    for one, other in zip(wanted, found, strict=True):
        for metric in ("loss", "router_z_loss", "expert_tokens_most"):
            assert other[metric] == pytest.approx(one[metric], rel=1e-5)


def test_biases_balance_the_experts(tmp_path: Path) -> None:
    excess = {}
    for rate in (0.0, 0.001):
        run = balanced(tmp_path, f"rate {rate}", {}, 24, rate)
        # The routers stay as they are.
        still = run.optimizer.model_copy(update={"learning_rate": 1e-9})
        train(run.model_copy(update={"optimizer": still, "checkpoint": CheckpointConfig()}))
        excess[rate] = sum(step["expert_imbalance"] - 1 for step in steps_of(tmp_path / f"rate {rate}")[-12:])
    assert excess[0.001] < 0.6 * excess[0.0]
