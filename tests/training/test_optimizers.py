"""The optimizers of a run: each computes on every mesh what it computes in one process."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from transformers.models.mixtral import modeling_mixtral

from meshtrain.config.optimizer import AdjustedLearningRate, GroupConfig, OptimizerConfig, OptimizerName
from meshtrain.config.run import ModelConfig, RunConfig
from meshtrain.errors import CheckpointError, ConfigError
from meshtrain.models.initialize import restore_buffers
from meshtrain.parallel.account import account
from meshtrain.parallel.local_parameter import full_parameter
from meshtrain.runtime.ranks import RankError
from meshtrain.training.optim import build_optimizer, optimizer_over
from meshtrain.training.parameter_groups import parameter_groups
from meshtrain.training.resolve import resolve_run
from meshtrain.verify.case import ProofCase, Trace, with_noise
from meshtrain.verify.parallel import build_on_ranks, train_pipeline
from meshtrain.verify.parallel import fill as fill_parameters
from meshtrain.verify.reference import build_stock, copy_weights, copy_weights_into, train_model
from tests.casts import lift_float32_casts
from tests.parallel.test_context import case_of
from tests.parity import (
    Case,
    _stock_model,
    assert_equal_to_reference,
    batches,
    build,
    fill,
    stock_weights,
)
from tests.ranks import run_on_ranks
from tests.training.runs import QWEN3, VOCABULARY, build_plan, build_run, steps_of, train_here

# Loaded before casts are lifted.
MODELLING = (modeling_mixtral,)
MIXTRAL = ModelConfig(
    type="mixtral",
    config={
        "vocab_size": VOCABULARY,
        **QWEN3,
        "num_local_experts": 4,
        "tie_word_embeddings": False,
    },
)
SHARED: dict[str, Any] = {"weight_decay": 0.1, "max_gradient_norm": 0.5}
GROUPS = [
    GroupConfig(parameters=["model.embed_tokens", "lm_head.weight"], learning_rate=5e-3),
    GroupConfig(parameters=["model.layers.*.mlp"], weight_decay=0.5),
    GroupConfig(parameters=["model.layers.1", "model.norm"], learning_rate=0.0, weight_decay=0.0),
]
# What the names of the parameters of each group begin with, in full.
NAMED = (
    ("model.embed_tokens.", "lm_head."),
    tuple(f"model.layers.{layer}.mlp." for layer in range(4)),
    ("model.layers.1.", "model.norm."),
)
CONFIGS = {
    "adamw": OptimizerConfig(learning_rate=1e-3, epsilon=1e-4, groups=GROUPS, **SHARED),
    "lion": OptimizerConfig(name="lion", learning_rate=1e-3, beta2=0.99, **SHARED),
    "muon": OptimizerConfig(
        name="muon", learning_rate=5e-3, adamw_learning_rate=1e-3, epsilon=1e-4, groups=GROUPS, **SHARED
    ),
    "sgd": OptimizerConfig(name="sgd", learning_rate=1e-1, **SHARED),
    "adafactor": OptimizerConfig(name="adafactor", learning_rate=1e-2, groups=GROUPS, **SHARED),
    "adamw-schedule-free": OptimizerConfig(
        name="adamw-schedule-free", learning_rate=1e-3, epsilon=1e-4, groups=GROUPS, **SHARED
    ),
}
CASES = {
    1: [Case("llama-untied", (1, 1, 1, 1))],
    2: [Case("llama-untied", mesh) for mesh in ((2, 1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (1, 2, 1, 1))],
    4: [Case("llama-untied", (2, 1, 1, 2))],
}
# Meshes on which parts of a matrix are in other places than for AdamW.
CASES_OF_MATRICES = {
    1: [],
    2: [Case("llama-untied", (1, 1, 2, 1), offload="cpu")],
    4: [Case("llama-untied", mesh) for mesh in ((1, 1, 2, 2), (1, 2, 2, 1), (2, 1, 2, 1))],
}


class PlainLion(Optimizer):
    """The formulas of the paper."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for x in group["params"]:
                moment = self.state[x].get("m", torch.zeros_like(x))
                first, second = group["betas"]
                update = (first * moment + (1 - first) * x.grad).sign()
                x -= group["lr"] * (update + group["weight_decay"] * x)
                self.state[x]["m"] = second * moment + (1 - second) * x.grad


class PlainScheduleFree(Optimizer):
    """The formulas of the paper, with x, y and z."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for y in group["params"]:
                state, rate, (first, second) = self.state[y], group["lr"], group["betas"]
                x, z, v = (state.get(name, start) for name, start in (("x", y), ("z", y), ("v", torch.zeros_like(y))))
                step, total = state.get("step", 0) + 1, state.get("total", 0.0) + rate**2
                v = second * v + (1 - second) * y.grad**2
                direction = y.grad / ((v / (1 - second**step)).sqrt() + group["eps"])
                z = z - rate * (direction + group["weight_decay"] * y)
                share = rate**2 / total if total else 0.0
                x = (1 - share) * x + share * z
                y.copy_((1 - first) * z + first * x)
                self.state[y] = {"x": x, "z": z, "v": v, "step": step, "total": total}


class Both:
    """Two optimizers."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        for part in self.parts:
            part.step()


def is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.dim() == 2 and "layers." in name


def plain_optimizer(named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> Any:
    """Return what one process uses, with a group for each parameter."""
    groups, of_matrices = [], []
    for name, parameter in named:
        rate, decay = config.learning_rate, config.weight_decay if parameter.dim() > 1 else 0.0
        if config.name == "muon" and not is_matrix(name, parameter):
            rate = config.adamw_learning_rate or rate
        for own, named_by in zip(config.groups, NAMED, strict=False):
            if name.startswith(named_by):
                rate = rate if own.learning_rate is None else own.learning_rate
                decay = decay if own.weight_decay is None else own.weight_decay
                break
        by_muon = config.name == "muon" and is_matrix(name, parameter)
        (of_matrices if by_muon else groups).append({"params": [parameter], "lr": rate, "weight_decay": decay})
    if config.name == "sgd":
        return SGD(groups, momentum=config.beta1)
    if config.name == "adafactor":
        return Adafactor(groups)
    betas = config.beta1, config.beta2
    if config.name == "lion":
        return PlainLion(groups, {"betas": betas})
    if config.name == "adamw-schedule-free":
        return PlainScheduleFree(groups, {"betas": betas, "eps": config.epsilon})
    adamw = AdamW(groups, betas=betas, eps=config.epsilon)
    return Both(torch_muon(of_matrices, config), adamw) if config.name == "muon" else adamw


def torch_muon(groups: Any, config: OptimizerConfig) -> torch.optim.Muon:
    rates = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    return torch.optim.Muon(groups, **rates, momentum=config.muon_momentum, adjust_lr_fn=config.adjust_lr_fn)


def reference(config: OptimizerConfig) -> Trace:
    lift_float32_casts()
    # torch's Muon computes in bfloat16, in which rounding is larger than what is compared.
    Tensor.bfloat16 = Tensor.clone  # type: ignore[assignment,method-assign]
    model = _stock_model("llama-untied")
    copy_weights_into(model, stock_weights("llama-untied"))
    return train_model(model, batches(), optimizer=plain_optimizer(model.named_parameters(), config))


def train_all(cases: list[Case], config: OptimizerConfig) -> list[Trace]:
    lift_float32_casts()
    found = []
    for case in cases:
        pipeline = build(case)
        fill(pipeline, stock_weights(case.model))
        found.append(train_pipeline(pipeline, batches(), config))
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_every_mesh_computes_what_one_process_does(name: str) -> None:
    (wanted,) = run_on_ranks(1, reference, CONFIGS[name])
    for world_size, usual in CASES.items():
        cases = usual + CASES_OF_MATRICES[world_size] if name in ("adafactor", "muon") else usual
        answers = run_on_ranks(world_size, train_all, cases, CONFIGS[name])
        for number in range(len(cases)):
            assert_equal_to_reference([traces[number] for traces in answers], wanted)


def train(run: RunConfig) -> list[float]:
    """Train on as many ranks as the plan needs, and return the losses."""
    run_on_ranks(run.plan.mesh.world_size, train_here, run, joins=False)
    return [metrics["loss"] for metrics in steps_of(Path(run.run_directory))]


@pytest.mark.parametrize("name", CONFIGS)
def test_parameter_may_get_its_first_gradient_later(name: str) -> None:
    (_, first), (_, second) = named = tensors((2, 2), (2, 2))
    optimizer = over(named, CONFIGS[name])
    first.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(second.detach(), torch.ones(2, 2))
    second.grad = torch.ones(2, 2)
    optimizer.step()
    assert second.detach().lt(1).all()


@pytest.mark.parametrize("name", ["adafactor", "adamw-schedule-free", "lion", "muon", "sgd"])
def test_run_resumes_on_other_meshes(name: OptimizerName, tmp_path: Path) -> None:
    group = GroupConfig(parameters=["model.layers.*.mlp"], learning_rate=1e-4)
    optimizer = OptimizerConfig(name=name, learning_rate=1e-3, groups=[group])
    whole = build_run(tmp_path / "whole", "qwen3", build_plan((1, 1, 1, 1)), steps=3, optimizer=optimizer)
    wanted = train(whole)
    for steps, mesh in enumerate(((1, 1, 2, 1), (1, 1, 1, 2), (2, 1, 1, 1)), start=1):
        run = build_run(tmp_path / "other", "qwen3", build_plan(mesh), steps=steps, optimizer=optimizer)
        found = train(run)
    assert found == pytest.approx(wanted, rel=1e-12)


class OfStacks(Both):
    """An optimizer of torch for parts of stacks of experts, beside the usual one."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], config: OptimizerConfig) -> None:
        self.names = {parameter: name for name, parameter in named}
        self.config = config
        self.views = {
            parameter: [nn.Parameter(it) for it in self.views_of(parameter, parameter.detach())]
            for name, parameter in named
            if ".experts." in name
        }
        usual = plain_optimizer([(name, it) for name, it in named if it not in self.views], config)
        groups = [{"params": of_stack} for of_stack in self.views.values()]
        rates = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
        of_parts = torch_muon(groups, config) if config.name == "muon" else Adafactor(groups, **rates)
        super().__init__(of_parts, usual)

    def zero_grad(self) -> None:
        super().zero_grad()
        for stack in self.views:
            stack.grad = None

    def step(self) -> None:
        for stack, views in self.views.items():
            assert stack.grad is not None
            for view, gradient in zip(views, self.views_of(stack, stack.grad), strict=True):
                view.grad = gradient.contiguous()
        super().step()

    def views_of(self, stack: Tensor, values: Tensor) -> list[Tensor]:
        """Return the view with gate and up projection apart, or for Muon each matrix."""
        apart = values.unflatten(1, (2, -1)) if self.names[stack].endswith("gate_up_proj") else values
        return [*apart.flatten(0, -3)] if self.config.name == "muon" else [apart]


OF_STACKS = {
    "muon": OptimizerConfig(name="muon", learning_rate=5e-3, epsilon=1e-4, **SHARED),
    "adafactor": OptimizerConfig(name="adafactor", learning_rate=1e-2, **SHARED),
}


def experts_reference(cases: list[ProofCase], config: OptimizerConfig) -> list[tuple[dict[str, Tensor], Trace]]:
    Tensor.bfloat16 = Tensor.clone  # type: ignore[assignment,method-assign]
    lift_float32_casts()
    found = []
    for case in cases:
        model = build_stock(case.hf_config, attention=case.attention)
        weights = with_noise(copy_weights(model))
        copy_weights_into(model, weights)
        optimizer: Any = OfStacks([*model.named_parameters()], config)
        found.append((weights, train_model(model, case.batches(), optimizer=optimizer)))
    return found


def train_experts(cases: list[ProofCase], weights: list[dict[str, Tensor]], config: OptimizerConfig) -> list[Trace]:
    lift_float32_casts()
    found = []
    for case, values in zip(cases, weights, strict=True):
        pipeline = build_on_ranks(case, case.plan)
        for stage in pipeline.stages:
            restore_buffers(stage.model)
        fill_parameters(pipeline, values)
        found.append(train_pipeline(pipeline, case.batches(), config))
    return found


@pytest.mark.parametrize("name", OF_STACKS)
def test_parts_of_stacked_experts_are_matrices(name: str) -> None:
    cases = [case_of("mixtral", mesh) for mesh in ({"ep": 2}, {"tp": 2}, {"dp_shard": 2})]
    (references,) = run_on_ranks(1, experts_reference, cases, OF_STACKS[name])
    answers = run_on_ranks(2, train_experts, cases, [weights for weights, _ in references], OF_STACKS[name])
    for number, (_, wanted) in enumerate(references):
        assert_equal_to_reference([traces[number] for traces in answers], wanted)


def test_run_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    run = build_run(tmp_path / "run", "qwen3", build_plan((1, 1, 1, 1)), steps=1)
    train(run)
    # The settings that it started with are compared first.
    (tmp_path / "run" / "run.toml").unlink()
    other = run.model_copy(update={"steps": 2, "optimizer": OptimizerConfig(name="lion")})
    with pytest.raises(RankError) as caught:
        train(other)
    assert isinstance(caught.value.original, CheckpointError)
    assert "optimizer.name is 'adamw' in the checkpoint and 'lion' in this run" in str(caught.value.original)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ["model.layers.*.mlps"],
            "optimizer.groups: 'model.layers.*.mlps' matches no parameter of the model; the nearest is "
            "'model.layers.*.mlp'",
        ),
        # The head of this model is its embedding.
        (
            ["lm_head.weight"],
            "optimizer.groups: 'lm_head.weight': lm_head.weight is tied to model.embed_tokens.weight; name that one",
        ),
        (
            ["model.layers", "model.layers.*.mlp"],
            "optimizer.groups: groups before it have all parameters of ['model.layers.*.mlp']; put it first, or leave "
            "it out",
        ),
    ],
)
def test_groups_without_a_parameter_are_refused(patterns: list[str], message: str, tmp_path: Path) -> None:
    groups = [GroupConfig(parameters=[pattern], weight_decay=0.0) for pattern in patterns]
    run = build_run(tmp_path / "run", "qwen3", build_plan((1, 1, 1, 1)), optimizer=OptimizerConfig(groups=groups))
    with pytest.raises(ConfigError) as caught:
        resolve_run(run)
    assert caught.value.lines == (message,)


def names_in_groups(config: OptimizerConfig) -> list[list[str]]:
    """Return the names of the parameters of each group, with those of parts."""
    pipeline = build(Case("gpt2-tied", (1, 1, 1, 1)))
    names = {id(parameter): name for name, parameter in pipeline.named_parameters()}
    groups = build_optimizer(pipeline, config).param_groups
    return [[names[id(full_parameter(it))] for it in group["params"]] for group in groups]


def test_parts_of_a_fused_parameter_are_in_the_group_of_its_stock_name() -> None:
    group = GroupConfig(parameters=["transformer.h.1.attn.c_attn.weight", "transformer.wte"], weight_decay=0.0)
    found = run_on_ranks(1, names_in_groups, OptimizerConfig(groups=[group]))[0]
    parts = [f"transformer.h.1.attn.c_attn.{part}.weight" for part in "qkv"]
    assert found[2] == ["transformer.wte.weight", *parts]
    assert found[3] == []


def over(named: list[tuple[str, nn.Parameter]], config: OptimizerConfig) -> Optimizer:
    matrices: dict[Tensor, Tensor] = {it: it for name, it in named if is_matrix(name, it)}
    return optimizer_over(named, parameter_groups(named, config, matrices), config, seed=0, matrices=matrices)


def tensors(*shapes: tuple[int, ...]) -> list[tuple[str, nn.Parameter]]:
    return [(f"layers.{index}.weight", nn.Parameter(torch.ones(shape))) for index, shape in enumerate(shapes)]


def test_groups_have_their_own_rate_and_decay() -> None:
    named = tensors((2, 2), (2,), (2, 2), (2,))
    groups = [GroupConfig(parameters=["layers.2", "layers.3.weight"], learning_rate=3e-4, weight_decay=0.25)]
    found = over(named, OptimizerConfig(learning_rate=1e-3, groups=groups)).param_groups
    kept = [(len(it["params"]), it["weight_decay"], round(it["learning_rate_factor"], 6)) for it in found]
    assert kept == [(1, 0.1, 1.0), (1, 0.0, 1.0), (1, 0.25, 0.3), (1, 0.25, 0.3)]


def test_muon_has_a_group_of_its_own_and_a_rate_for_all_others() -> None:
    named = [*tensors((2, 2), (2,)), ("lm_head.weight", nn.Parameter(torch.ones(2, 2)))]
    config = OptimizerConfig(name="muon", learning_rate=1e-2, adamw_learning_rate=1e-3)
    kept = [
        (len(it["params"]), it["use_muon"], it["weight_decay"], round(it["learning_rate_factor"], 6))
        for it in over(named, config).param_groups
    ]
    assert kept == [(1, True, 0.1, 1.0), (1, False, 0.1, 0.1), (1, False, 0.0, 0.1)]


@pytest.mark.parametrize("adjust_lr_fn", ["match_rms_adamw", "original"])
def test_muon_takes_the_steps_of_torch(adjust_lr_fn: AdjustedLearningRate) -> None:
    ours, theirs = (tensors((24, 40), (40, 24)) for _ in range(2))
    config = OptimizerConfig(name="muon", learning_rate=0.02, adjust_lr_fn=adjust_lr_fn)
    optimizers = over(ours, config), torch_muon([it for _, it in theirs], config)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        for (_, mine), (_, other) in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=draw)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for (_, mine), (_, other) in zip(ours, theirs, strict=True):
        moved = (other.detach() - 1).norm()
        assert (mine - other).norm() < 1e-6 * moved


@pytest.mark.parametrize(
    ("config", "name", "number"),
    [
        (OptimizerConfig(name="adafactor"), "layers.0", 8 / 15),
        (OptimizerConfig(), "layers.0", 2),
        (OptimizerConfig(name="adamw-schedule-free"), "layers.0", 2),
        (OptimizerConfig(name="lion"), "layers.0", 1),
        (OptimizerConfig(name="muon"), "layers.0", 1),
        (OptimizerConfig(name="muon"), "lm_head", 2),
        (OptimizerConfig(name="sgd"), "layers.0", 1),
        (OptimizerConfig(name="sgd", beta1=0.0), "layers.0", 0),
    ],
    ids=lambda it: f"{it.name}-{it.beta1}" if isinstance(it, OptimizerConfig) else str(it),
)
def test_bytes_of_state_are_those_that_are_kept(config: OptimizerConfig, name: str, number: float) -> None:
    parameter = nn.Parameter(torch.ones(3, 5))
    optimizer = over([(f"{name}.weight", parameter)], config)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [it for it in optimizer.state[parameter].values() if isinstance(it, Tensor) and it.dim() > 0]
    known = config.state_bytes(4, parameter.shape, parameter.shape, of_matrix=is_matrix(name + ".", parameter))
    assert sum(it.nbytes for it in kept) == known == number * parameter.nbytes


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_check_counts_what_a_matrix_keeps(name: OptimizerName) -> None:
    run = RunConfig.model_validate(
        {
            "run_directory": "out",
            "steps": 1,
            "global_batch_size": 2,
            "model": MIXTRAL.model_dump(),
            "data": {"sequence_length": 8, "train": ["text.jsonl"], "tokenizer": {"vocab_size": VOCABULARY}},
            "optimizer": {"name": name},
        }
    )
    resolved = resolve_run(run, 2)
    (stage,) = account(resolved.model, resolved.plan, run.kept_bytes)
    sizes = {name: it.numel() for name, it in resolved.model.named_parameters()}
    matrices = sum(size for name, size in sizes.items() if re.search(r"\.(self_attn|mlp)\.", name))
    numbers = 2 * sum(sizes.values()) - (matrices if name == "muon" else 0)
    assert stage.optimizer_bytes == 4 * numbers / 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "lion", "epsilon": 1e-6}, "`epsilon` is not read by the optimizer 'lion'; leave it out"),
        ({"name": "sgd", "beta2": 0.9}, "`beta2` is not read by the optimizer 'sgd'; leave it out"),
        ({"name": "sgd", "state": "bfloat16"}, "`state` is not read by the optimizer 'sgd'; leave it out"),
        ({"name": "muon", "state": "bfloat16"}, "`state` is not read by the optimizer 'muon'; leave it out"),
        ({"name": "adafactor", "beta1": 0.8}, "`beta1` is not read by the optimizer 'adafactor'; leave it out"),
        ({"beta2_decay": -0.5}, "`beta2_decay` is not read by the optimizer 'adamw'; leave it out"),
        (
            {"name": "adamw-schedule-free", "beta1": 0.0},
            "`beta1` = 0 keeps no average of the weights, which is the result of 'adamw-schedule-free'; raise it",
        ),
        ({"muon_momentum": 0.9}, "`muon_momentum` is not read by the optimizer 'adamw'; leave it out"),
        (
            {"name": "lion", "adamw_learning_rate": 1e-3},
            "`adamw_learning_rate` is not read by the optimizer 'lion'; leave it out",
        ),
        (
            {"groups": [{"parameters": ["a"]}]},
            "none of `learning_rate`, `weight_decay` and `frozen` is set; set one, or leave the group out",
        ),
        (
            {"groups": [{"parameters": ["a"], "frozen": True, "weight_decay": 0.0}]},
            "`weight_decay` is set for a frozen group; leave it out, or set frozen = false",
        ),
    ],
)
def test_settings_that_nothing_reads_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        OptimizerConfig.model_validate(settings)
