"""Wrong arguments of public functions are one-line errors that say what to do."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam

import meshtrain
from meshtrain.api.handle import pipeline_of
from meshtrain.errors import CheckpointError, ConfigError, MeshtrainError, ModelError, UserError
from meshtrain.models.build import load_hf_config
from meshtrain.training.hooks import check_hooks
from tests.api.programs import stock_model
from tests.parity import MODELS
from tests.ranks import run_on_ranks

A_PLAN = (
    'pass a table such as {"mesh": {"tp": 4}}, a .toml or .json file, or the name of a shipped plan, such as '
    "'families/gpt2'"
)
A_SOURCE = "pass a directory, a hub id or a configuration"
AN_OPTIMIZER = "pass an optimizer, such as torch.optim.AdamW(model.parameters())"
A_STATE = "pass a meshtrain.TrainState(model, optimizer, step, values)"
A_DTYPE = "pass torch.float64, torch.float32, torch.bfloat16, torch.float16"
A_NORM = "pass a number above 0, or inf to measure only"
PROMPTS = 'pass token ids (batch, seq) in a tensor, such as tokenizer(["text"], return_tensors="pt").input_ids'
JSON = "save what JSON has: None, bools, numbers and strings, in lists and in dicts with strings for keys"
WRAPPED = (
    "has copies or shards of its own; pass the model inside (model.module), and use the plan instead: "
    '{"mesh": {"dp_replicate": N}} as DDP, {"mesh": {"dp_shard": N}} as FSDP'
)
OVERRIDES = "pass a list of strings, such as ['mesh.tp=4']"
A_RUN = "pass what meshtrain.load_run(path) returns"


class NeverCalled(meshtrain.Hook):
    """Has a method that is not a hook method."""

    def on_steps(self, state: Any, metrics: Any) -> None:
        """Do nothing."""


class TakesLess(meshtrain.Hook):
    """Takes too few arguments, so would fail at the first step."""

    def on_step(self, state: Any) -> None:  # type: ignore[override]
        """Do nothing."""


class Waits(meshtrain.Hook):
    """Is a coroutine, so would never run."""

    async def on_end(self, state: Any, metrics: Any) -> None:  # type: ignore[override]
        """Do nothing."""


class NoMethod(meshtrain.Hook):
    """Has a value instead of a method."""

    on_start = None  # type: ignore[assignment]


Mistake = tuple[Callable[[], Any], type[MeshtrainError], str]


def plans() -> dict[str, Mistake]:
    """Return values that are not a plan, a file or an override."""
    by_plan = {
        "None": (None, f"plan is None; {A_PLAN}"),
        "a list": ([], f"plan is a list; {A_PLAN}"),
        "a number": (3, f"plan is 3; {A_PLAN}"),
        "a class": (dict, f"plan is the class dict; {A_PLAN}"),
        "bytes": (b"{}", f"plan is b'{{}}'; {A_PLAN}"),
        "no name": ("", f"plan is the string ''; {A_PLAN}"),
        "a key that is a number": ({1: 2}, "plan: a key is 1; use strings for keys"),
        "a key further down": ({"mesh": {None: 2}}, "plan: mesh: a key is None; use strings for keys"),
    }
    run, plan = meshtrain.load_run, meshtrain.load_plan
    no_path = "load_plan: path_or_name is 3; pass a .toml or .json file, or the name of a shipped plan, such as "
    return {
        **{
            f"plan: {name}": (partial(meshtrain.build_mesh, it), ConfigError, message)
            for name, (it, message) in by_plan.items()
        },
        "load_run None": (lambda: run(None), ConfigError, "load_run: path is None; pass a .toml or .json file"),
        "load_plan 3": (lambda: plan(3), ConfigError, f"{no_path}'families/gpt2'"),
        "one override": (
            lambda: run("run.toml", "steps=3"),
            ConfigError,
            f"overrides is the string 'steps=3'; {OVERRIDES}",
        ),
        "no override": (lambda: run("run.toml", [3]), ConfigError, "overrides[0] is 3; pass a string"),
        "overrides None": (lambda: plan(None, None), ConfigError, f"overrides is None; {OVERRIDES}"),
        "train a path": (
            lambda: meshtrain.train("run.toml"),
            ConfigError,
            f"train: config is the string 'run.toml'; {A_RUN}",
        ),
        "train a plan": (
            lambda: meshtrain.train(plan(None)),
            ConfigError,
            f"train: config is a ParallelPlan; {A_RUN}",
        ),
    }


def hooks() -> dict[str, Mistake]:
    """Return values that are not hooks, or hooks that would not be called."""
    given = {
        "None": (None, "hooks is None; pass a list of them, such as [hook]"),
        "one": (meshtrain.Hook(), "hooks is a Hook; pass a list of them, such as [hook]"),
        "class": ([NeverCalled], "hooks[0] is the class NeverCalled; pass an object of a subclass of meshtrain.Hook"),
        "misspelt": (
            [NeverCalled()],
            "NeverCalled.on_steps would never be called, because a hook has no such method; did you mean 'on_step'?",
        ),
        "signature": (
            [TakesLess()],
            "TakesLess.on_step cannot be called with a state and metrics: it is def on_step(state: Any) -> None; write "
            "def on_step(self, state, metrics)",
        ),
        "async": (
            [Waits()],
            "Waits.on_end cannot be called with a state and metrics: it is async def on_end(state: Any, metrics: Any) "
            "-> None; write def on_end(self, state, metrics)",
        ),
        "value": (
            [NoMethod()],
            "NoMethod.on_start cannot be called with a state and metrics: it is None; write def on_start(self, state, "
            "metrics)",
        ),
    }
    return {f"hooks: {name}": (partial(check_hooks, it), ConfigError, message) for name, (it, message) in given.items()}


def models() -> dict[str, Mistake]:
    """Return wrong arguments of `parallelize`, `build_model` and `initialize`."""
    stock, config = stock_model("gpt2-tied"), load_hf_config(MODELS["gpt2-tied"])
    parallelize = partial(meshtrain.parallelize, stock, {})
    build = meshtrain.build_model
    arguments: dict[str, tuple[dict[str, Any], str]] = {
        "micro 0": ({"micro_batch_size": 0}, "micro_batch_size is 0; pass a whole number from 1"),
        "micro 2.5": ({"micro_batch_size": 2.5}, "micro_batch_size is 2.5; pass a whole number from 1"),
        "micro 2": ({"micro_batch_size": "2"}, "micro_batch_size is the string '2'; pass a whole number from 1"),
        "micro None": ({"micro_batch_size": None}, "micro_batch_size is None; pass a whole number from 1"),
        "seed": ({"seed": 1.5}, "seed is 1.5; pass a whole number"),
        "prove": ({"prove_unknown_class": "no"}, "prove_unknown_class is the string 'no'; pass True or False"),
        "mesh": ({"mesh": {"tp": 1}}, "mesh is a dict; pass what meshtrain.build_mesh(plan) returns, or None"),
    }
    built: dict[str, tuple[Callable[[], Any], str]] = {
        "None": (lambda: build(None), f"source is None; {A_SOURCE}"),
        "a model": (lambda: build(stock), f"source is a GPT2LMHeadModel; {A_SOURCE}"),
        "dtype None": (lambda: build(config, dtype=None), f"dtype is None; {A_DTYPE}"),
        "dtype": (lambda: build(config, dtype="half-ish"), f"dtype is the string 'half-ish'; {A_DTYPE}"),
        "attention": (lambda: build(config, attention=3), "attention is 3; pass 'eager', 'sdpa' or another name of "),
        "trust": (lambda: build("x", trust_remote_code="no"), "trust_remote_code is the string 'no'; pass True or F"),
    }
    return {
        **{
            f"parallelize: {n}": (partial(parallelize, **it), ConfigError, f"parallelize: {message}")
            for n, (it, message) in arguments.items()
        },
        **{f"build_model: {n}": (call, ModelError, f"build_model: {message}") for n, (call, message) in built.items()},
        "None": (
            lambda: meshtrain.parallelize(None, {}),
            ModelError,
            "None is not a model of transformers; pass one, ",
        ),
        "replicated": (
            lambda: meshtrain.parallelize(nn.DataParallel(stock), {}),
            ModelError,
            f"a DataParallel {WRAPPED}",
        ),
        "compiled": (
            lambda: meshtrain.parallelize(torch.compile(stock), {}),
            ModelError,
            "this model is compiled, but the plan decides what is compiled; pass the model from before ",
        ),
        "not ours": (
            lambda: meshtrain.initialize(None),
            ModelError,
            "None is not a parallel model; pass what meshtrain.",
        ),
    }


def values(model: Any) -> dict[str, Mistake]:
    """Return wrong arguments of the functions that change or read values."""
    clip, rebind, parameters = partial(meshtrain.clip_grad_norm, model), meshtrain.rebind, [*model.parameters()]
    scheduler = torch.optim.lr_scheduler.LambdaLR(SGD(parameters), lambda step: 1.0)
    norms: dict[str, Any] = {
        "-1.0": -1.0,
        "0": 0,
        "nan": float("nan"),
        "the string '1'": "1",
        "None": None,
        "True": True,
    }
    bound = {"None": None, "the class Adam": Adam, "a LambdaLR": scheduler, "a GPT2LMHeadModel": model, "a list": [1]}
    seeds: dict[str, Any] = {"None": None, "the string '1'": "1", "1.5": 1.5, "True": True}
    foreign = SGD(nn.Linear(2, 2).parameters())
    return {
        **{
            f"clip {message}": (partial(clip, it), ConfigError, f"clip_grad_norm: max_norm is {message}; {A_NORM}")
            for message, it in norms.items()
        },
        **{
            f"rebind {message}": (partial(rebind, it), ModelError, f"rebind: optimizer is {message}; {AN_OPTIMIZER}")
            for message, it in bound.items()
        },
        **{
            f"seed {message}": (
                partial(meshtrain.initialize, model, it),
                ModelError,
                f"initialize: seed is {message}; pass a whole number",
            )
            for message, it in seeds.items()
        },
        "rebind foreign": (
            lambda: rebind(foreign),
            ModelError,
            "rebind: this SGD holds 2 parameters, and none of a parallel model; call it after meshtrain.parallelize, ",
        ),
        "rebind LBFGS": (
            lambda: rebind(LBFGS(parameters)),
            ModelError,
            "rebind: LBFGS has a list of its parameters that cannot be changed; make it after meshtrain.parallelize, ",
        ),
        "load None": (
            lambda: meshtrain.load_weights(model, None),
            ModelError,
            "load_weights: folder is None; pass a directory or a hub id",
        ),
        "enlarge": (
            lambda: meshtrain.load_weights(model, "x", enlarge_vocabulary="no"),
            ModelError,
            "load_weights: enlarge_vocabulary is the string 'no'; pass True or False",
        ),
        "generate text": (
            lambda: meshtrain.generate(model, "hello"),
            UserError,
            f"generate: inputs is the string 'hello'; {PROMPTS}",
        ),
        "generate list": (lambda: model.generate([1, 2]), UserError, f"generate: inputs is a list; {PROMPTS}"),
    }


def states(model: Any, folder: Path) -> dict[str, Mistake]:
    """Return values that cannot be saved as a checkpoint, and paths that cannot hold one."""
    file = folder / "file"
    file.write_text("x")
    given: dict[str, tuple[dict[str, Any], str]] = {
        "step -3": ({"step": -3}, "save_checkpoint: state.step is -3; pass a whole number from 0"),
        "step 3": ({"step": "3"}, "save_checkpoint: state.step is the string '3'; pass a whole number from 0"),
        "step 1.5": ({"step": 1.5}, "save_checkpoint: state.step is 1.5; pass a whole number from 0"),
        "step None": ({"step": None}, "save_checkpoint: state.step is None; pass a whole number from 0"),
        "step True": ({"step": True}, "save_checkpoint: state.step is True; pass a whole number from 0"),
        "values": ({"values": [1]}, "save_checkpoint: state.values is a list; pass a dict, such as {'position': 3}"),
        "nan": ({"values": {"a": float("nan")}}, f"state.values['a'] is nan, which JSON does not have; {JSON}"),
        "optimizer": ({"optimizer": "adam"}, f"save_checkpoint: state.optimizer is the string 'adam'; {AN_OPTIMIZER}"),
        "class": ({"optimizer": Adam}, f"save_checkpoint: state.optimizer is the class Adam; {AN_OPTIMIZER}"),
        "dict": ({"optimizer": {}}, f"save_checkpoint: state.optimizer is a dict; {AN_OPTIMIZER}"),
    }
    state = meshtrain.TrainState(model)
    save = partial(meshtrain.save_checkpoint, folder / "never")
    calls: dict[str, tuple[Callable[[], Any], str]] = {
        "save None": (lambda: save(None), f"save_checkpoint: state is None; {A_STATE}"),
        "save model": (lambda: save(model), f"save_checkpoint: state is a GPT2LMHeadModel; {A_STATE}"),
        "keep 3": (lambda: save(state, keep="3"), "save_checkpoint: keep is the string '3'; pass a whole number"),
        "keep 1.5": (lambda: save(state, keep=1.5), "save_checkpoint: keep is 1.5; pass a whole number"),
        "keep None": (lambda: save(state, keep=None), "save_checkpoint: keep is None; pass a whole number"),
        "keep 0": (lambda: save(state, keep=0), "keep = 0: the checkpoint that is written must stay; pass 1 or "),
    }
    for call in (meshtrain.save_checkpoint, meshtrain.load_checkpoint):
        name = call.__name__
        at: dict[str, Any] = {"None": None, "3": 3, "the string ''": ""}
        for message, it in at.items():
            calls[f"{name} in {message}"] = (
                partial(call, it, state),
                f"{name}: directory is {message}; pass a path or URL",
            )
        message = f"{name}: directory = '{file}' is a file; pass the directory of the checkpoints"
        calls[f"{name} in a file"] = (partial(call, file, state), message)
    return {
        **{
            n: (partial(save, meshtrain.TrainState(**{"model": model, **it})), CheckpointError, message)
            for n, (it, message) in given.items()
        },
        **{name: (call, CheckpointError, message) for name, (call, message) in calls.items()},
    }


def folders(model: Any, folder: Path) -> dict[str, Mistake]:
    """Return arguments with which weights cannot be written."""
    save, lay = meshtrain.save_pretrained, meshtrain.save_parallelized
    never = folder / "never"
    calls: dict[str, tuple[Callable[[], Any], str]] = {
        "None": (lambda: save(model, None), "save_pretrained: folder is None; pass a path"),
        "a URL": (lambda: save(model, "s3://b/x"), "save_pretrained: folder = 's3://b/x' is a URL; pass a folder of "),
        "dtype": (lambda: save(model, never, dtype="nope"), f"save_pretrained: dtype is the string 'nope'; {A_DTYPE}"),
        "tokenizer": (
            lambda: save(model, never, tokenizer=3),
            "save_pretrained: tokenizer is 3; pass a tokenizer, or ",
        ),
        "size": (
            lambda: save(model, never, max_shard_size=-1),
            "save_pretrained: max_shard_size is -1; pass '5GB', or",
        ),
        "parts None": (lambda: lay(model, None), "save_parallelized: folder is None; pass a path"),
        "parts": (lambda: lay(model, never, tokenizer=3), "save_parallelized: tokenizer is 3; pass a tokenizer, or a"),
        "state_dict": (
            lambda: model.save_pretrained(never, state_dict={}),
            "save_pretrained: state_dict is a dict, and a parallel model writes the values that it has; leave it out",
        ),
        "push_to_hub": (
            lambda: model.save_pretrained(never, push_to_hub=True),
            "save_pretrained: push_to_hub is True, and a parallel model writes a folder; upload that afterwards, with "
            "huggingface_hub.upload_folder",
        ),
        "pickles": (
            lambda: model.save_pretrained(never, safe_serialization=False),
            "save_pretrained: safe_serialization is False, and a parallel model writes safetensors only; leave it out",
        ),
        "misspelt": (
            lambda: model.save_pretrained(never, tokeniser=None),
            "save_pretrained: unknown keyword 'tokeniser'; did you mean 'tokenizer'?",
        ),
    }
    return {f"write: {name}": (call, CheckpointError, message) for name, (call, message) in calls.items()}


def make_mistakes(folder: Path) -> dict[str, tuple[str, str, str, str]]:
    """Make every mistake in one process; return name -> wanted and found error kind and line."""
    model = meshtrain.parallelize(stock_model("gpt2-tied"), {"mesh": {"tp": np.int64(1)}})
    before = [parameter.detach().clone() for parameter in model.parameters()]
    every = [plans(), hooks(), models(), values(model), states(model, folder), folders(model, folder)]
    answers = {}
    for name, (call, kind, message) in (item for mistakes in every for item in mistakes.items()):
        with pytest.raises(Exception) as error:  # noqa: PT011
            call()
        answers[name] = (kind.__name__, message, error.type.__name__, str(error.value))
    assert sorted(path.name for path in folder.iterdir()) == ["file"]
    assert all(map(torch.equal, model.parameters(), before))
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, str, str]]:
    (found,) = run_on_ranks(1, make_mistakes, tmp_path_factory.mktemp("mistakes"))
    return found


GROUPS = [
    "plan",
    "hooks",
    "parallelize",
    "build_model",
    "clip",
    "rebind",
    "seed",
    "step",
    "keep",
    "save",
    "load",
    "write",
]


@pytest.mark.parametrize("start", [*GROUPS, ""])
def test_wrong_argument_is_a_one_line_error(answers: dict[str, tuple[str, str, str, str]], start: str) -> None:
    mistakes = {name: message for name, message in answers.items() if name.startswith(start)}
    assert len(mistakes) > 1
    for name, (kind, wanted, found_kind, found) in mistakes.items():
        assert (name, found_kind) == (name, kind), found
        assert found.startswith(wanted), name
        assert "\n" not in found


def save_with_stock_keywords(folder: Path) -> list[torch.dtype]:
    model = meshtrain.parallelize(stock_model("gpt2-tied"), {})
    stock = {
        "is_main_process": False,
        "safe_serialization": True,
        "state_dict": None,
        "push_to_hub": False,
        "token": "x",
    }
    model.save_pretrained(folder / "stock", dtype="torch.bfloat16", **stock)
    again = meshtrain.build_model(folder / "stock", dtype="float64")
    saved = meshtrain.save_checkpoint(folder, meshtrain.TrainState(model, step=np.int64(3)))
    assert saved == folder / "step-3"
    return [next(again.parameters()).dtype, again.config.dtype]


def test_numpy_integers_dtype_names_and_stock_keywords_are_accepted(tmp_path: Path) -> None:
    assert run_on_ranks(1, save_with_stock_keywords, tmp_path) == [[torch.float64, torch.bfloat16]]


def step_with_lbfgs(mesh: dict[str, int]) -> str:
    model = meshtrain.parallelize(stock_model("gpt2-tied"), {"mesh": mesh})
    optimizer = LBFGS([parameter for _, parameter in pipeline_of(model).named_parameters()])
    with pytest.raises(ModelError) as error:
        optimizer.step(lambda: 0.0)
    return str(error.value)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}], ids=str)
def test_lbfgs_is_refused_where_no_rank_has_all_parameters(mesh: dict[str, int]) -> None:
    assert (
        run_on_ranks(2, step_with_lbfgs, mesh)
        == [
            "LBFGS computes with all parameters at once, which no rank has over tp or pp; use a mesh with tp = 1 and "
            "pp = 1, or an optimizer such as torch.optim.AdamW"
        ]
        * 2
    )


def test_on_methods_of_other_base_classes_are_ignored() -> None:
    class Other:
        def on_fire(self) -> None:
            """Is not related to training."""

    class Both(meshtrain.Hook, Other):
        def on_step(self, *answers: Any) -> None:
            """Accept any arguments."""

    assert len(check_hooks([Both()])) == 1
