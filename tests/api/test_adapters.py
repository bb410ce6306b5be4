"""Training LoRA adapters of peft on a parallel model equals training them on the stock model."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from torch import Tensor
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

import meshtrain
from meshtrain.api.handle import pipeline_of
from meshtrain.checkpoint.huggingface.adapters import gather_adapters
from meshtrain.checkpoint.huggingface.convert import convert
from meshtrain.errors import UserError
from meshtrain.models.adapters import is_adapter_parameter, stock_name
from meshtrain.models.build import load_hf_config
from meshtrain.models.layout import local_tensor
from tests.api.programs import Batch, own_part, padded_batches, stock_model
from tests.casts import lift_float32_casts
from tests.parity import MODELS
from tests.ranks import run_on_ranks

TARGETS = {"gpt2-tied": ["c_attn", "c_proj"], "llama-untied": "all-linear"}
Answer = tuple[list[float], dict[str, Tensor], float | None]


def adapted(name: str, **options: Any) -> PeftModel:
    """Build a tiny model with peft adapters, none of which is zero."""
    model = stock_model(name)
    values = {"r": 4, "lora_alpha": 12, "target_modules": TARGETS[name], "task_type": "CAUSAL_LM"} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = get_peft_model(model, LoraConfig(**values))
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    return peft_model


def train(model: Any, part: Any) -> list[float]:
    """Train the adapters with a plain loop."""
    optimizer = AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2, eps=1e-4)
    if not isinstance(part, type(None)):
        meshtrain.rebind(optimizer)
    return steps(model, optimizer, padded_batches(), part)


def steps(model: Any, optimizer: AdamW, batches: list[Batch], part: Any) -> list[float]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        rows: Batch = batch if part is None else part(batch)
        if isinstance(model, PeftModel):
            loss = model(**rows).loss
            loss.backward()
        else:
            loss = model.forward_backward(rows)
        optimizer.step()
        losses.append(loss.item())
    return losses


def without_adapters(model: Any) -> float | None:
    """Return the loss without adapters; a pipeline cannot compute it."""
    if not isinstance(model, PeftModel):
        return None
    with torch.no_grad(), model.disable_adapter():
        batch = padded_batches()[0]
        return model(**(batch if not has_mesh(model) else own_part(model, batch))).loss.item()


def has_mesh(model: PeftModel) -> bool:
    return "meshtrain" in vars(model.get_base_model())


def in_one_process(name: str, options: dict[str, Any], folder: Path) -> Answer:
    model = adapted(name, **options)
    losses = train(model, None)
    model.save_pretrained(str(folder))
    values = {
        stock_name(n): p.detach() for n, p in model.get_base_model().named_parameters() if is_adapter_parameter(n)
    }
    return losses, values, without_adapters(model)


def on_a_mesh(name: str, plan: dict[str, Any], options: dict[str, Any], folder: Path) -> Answer:
    model = meshtrain.parallelize(adapted(name, **options), plan)
    losses = train(model, lambda batch: own_part(model, batch))
    if isinstance(model, PeftModel):
        model.save_pretrained(str(folder))
    else:
        meshtrain.save_pretrained(model, folder)
    return losses, gather_adapters(pipeline_of(model)), without_adapters(model)


# Each case is model, plan and adapter options. The cases share their ranks, which are slow to
# start.
CASES: dict[int, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    2: [
        ("gpt2-tied", {"mesh": {"tp": 2}}, {}),
        ("gpt2-tied", {"mesh": {"pp": 2}}, {"use_rslora": True}),
        ("llama-untied", {"mesh": {"dp_replicate": 2, "dp_shard": 1}}, {}),
    ],
    4: [("llama-untied", {"mesh": {"dp_shard": 2, "tp": 2}, "tensor": {"sequence_parallel": True}}, {})],
}


def all_in_one_process(world_size: int, folder: Path) -> list[Answer]:
    return [in_one_process(name, options, folder / str(n)) for n, (name, _, options) in enumerate(CASES[world_size])]


def all_on_meshes(world_size: int, folder: Path) -> list[Answer]:
    cases = enumerate(CASES[world_size])
    return [on_a_mesh(name, plan, options, folder / str(n)) for n, (name, plan, options) in cases]


def all_values(world_size: int, folder: Path) -> list[dict[str, Tensor]]:
    return [values_of(folder / str(n), name) for n, (name, _, _) in enumerate(CASES[world_size])]


@pytest.mark.parametrize("world_size", CASES)
def test_adapters_train_as_on_the_stock_model(world_size: int, tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    (alone,) = run_on_ranks(1, all_in_one_process, world_size, one, joins=False)
    ranks = run_on_ranks(world_size, all_on_meshes, world_size, many, joins=False)
    (loaded,) = run_on_ranks(1, all_values, world_size, many, joins=False)
    for n, (losses, values, before) in enumerate(alone):
        gathered = ranks[0][n][1]
        assert gathered.keys() == values.keys()
        for found, _, disabled in (answers[n] for answers in ranks):
            assert found == pytest.approx(losses, rel=1e-12)
            assert disabled is None or disabled == pytest.approx(before, rel=1e-12)
        for key, value in values.items():
            assert torch.allclose(gathered[key], value, rtol=0, atol=1e-12), key
        assert all(torch.equal(loaded[n][key], value) for key, value in gathered.items())
        here, there = many / str(n), one / str(n)
        assert {file.name for file in here.iterdir()} == {file.name for file in there.iterdir()}
        assert (here / "adapter_config.json").read_text() == (there / "adapter_config.json").read_text()


def values_of(folder: Path, name: str) -> dict[str, Tensor]:
    """Load the saved adapters into the stock model with peft alone."""
    return values_in(PeftModel.from_pretrained(stock_model(name), str(folder)))


def values_in(model: PeftModel) -> dict[str, Tensor]:
    """Return the adapters of a stock model."""
    parameters = model.get_base_model().named_parameters()
    return {stock_name(name): value.detach() for name, value in parameters if is_adapter_parameter(name)}


def half_of_a_training(name: str, plan: dict[str, Any], folder: Path, half: str) -> list[float]:
    """Train the first two of four steps and save, or load and train the other two."""
    model = meshtrain.parallelize(adapted(name), plan)
    optimizer = AdamW([value for value in model.parameters() if value.requires_grad], lr=1e-2, eps=1e-4)
    meshtrain.rebind(optimizer)
    state = meshtrain.TrainState(model, optimizer)
    batches = padded_batches()
    if half == "second":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        meshtrain.load_checkpoint(folder, state)
        batches = batches[2:]
    losses = steps(model, optimizer, batches[:2], lambda batch: own_part(model, batch))
    if half == "first":
        state.step = 2
        meshtrain.save_checkpoint(folder, state)
    return losses


def test_checkpoint_of_base_and_adapters_loads_on_any_mesh(tmp_path: Path) -> None:
    name, run = "gpt2-tied", tmp_path / "run"
    ((losses, _, _),) = run_on_ranks(1, in_one_process, name, {}, tmp_path / "one", joins=False)
    first = run_on_ranks(2, half_of_a_training, name, {"mesh": {"tp": 2}}, run, "first", joins=False)
    second = run_on_ranks(2, half_of_a_training, name, {"mesh": {"pp": 2}}, run, "second", joins=False)
    assert [first[0] + second[0]] == [pytest.approx(losses, rel=1e-12)]
    with pytest.raises(UserError, match="holds LoRA adapters, which are not part of a stock model; for a"):
        convert(run, tmp_path / "model")


MERGED: dict[str, dict[str, Any]] = {"gpt2-tied": {"lora_bias": True}, "llama-untied": {}}


def merge_on_meshes(folder: Path) -> None:
    for name, options in MERGED.items():
        for axis in ("tp", "pp"):
            model = meshtrain.parallelize(adapted(name, **options), {"mesh": {axis: 2}})
            meshtrain.save_pretrained(model, folder / name / axis, dtype=torch.float64, merge_adapters=True)


def merge_in_one_process(folder: Path) -> list[str]:
    """Return the names of stock weights that differ from those that peft merges."""
    different = []
    for name, options in MERGED.items():
        merged = dict(adapted(name, **options).merge_and_unload().named_parameters())
        for axis in ("tp", "pp"):
            stock = AutoModelForCausalLM.from_pretrained(folder / name / axis, dtype=torch.float64)
            loaded = dict(stock.named_parameters())
            assert loaded.keys() == merged.keys()
            different += [
                f"{name} on {axis}: {key}" for key, value in merged.items() if not torch.equal(loaded[key], value)
            ]
    return different


def test_merged_weights_equal_those_of_peft_bit_for_bit(tmp_path: Path) -> None:
    run_on_ranks(2, merge_on_meshes, tmp_path, joins=False)
    assert run_on_ranks(1, merge_in_one_process, tmp_path, joins=False) == [[]]


def draw_on_meta(plan: dict[str, Any], kind: Any) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the initial adapters of a model from meta."""
    lift_float32_casts()
    model = meshtrain.build_model(load_hf_config(MODELS["gpt2-tied"]), dtype=torch.float64)
    config = LoraConfig(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, init_lora_weights=kind)
    model = meshtrain.parallelize(get_peft_model(model, config), plan, seed=3)
    meshtrain.initialize(model, seed=5)
    batch = own_part(model, padded_batches()[0])
    loss = model(**batch).loss if isinstance(model, PeftModel) else model.evaluate(batch)
    return loss.item(), gather_adapters(pipeline_of(model))


@pytest.mark.parametrize(("kind", "mesh"), [(True, {"tp": 2}), ("gaussian", {"pp": 2})])
def test_adapters_from_meta_start_equal_on_every_mesh(kind: Any, mesh: dict[str, int]) -> None:
    ((loss, wanted),) = run_on_ranks(1, draw_on_meta, {}, kind, joins=False)
    answers = run_on_ranks(2, draw_on_meta, {"mesh": mesh}, kind, joins=False)
    assert [found for found, _ in answers] == pytest.approx([loss, loss], rel=1e-12)
    assert all(torch.equal(answers[0][1][key], value) for key, value in wanted.items())
    for value in (value for key, value in wanted.items() if ".lora_A." in key):
        rank, width = value.shape
        assert value.std().item() == pytest.approx(1 / rank if kind == "gaussian" else (3 * width) ** -0.5, rel=0.2)
        assert kind == "gaussian" or value.abs().max() <= width**-0.5
    assert all(not value.any() for key, value in wanted.items() if ".lora_B." in key)


def load_base(folder: Path, mesh: dict[str, int]) -> tuple[float, bool]:
    """Return the loss with a base from files, and whether A is random and B is zero."""
    lift_float32_casts()
    model = meshtrain.build_model(folder, dtype=torch.float64)
    config = LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    model = meshtrain.parallelize(get_peft_model(model, config), {"mesh": mesh}, seed=3)
    meshtrain.load_weights(model, folder)
    values = {name: bool(local_tensor(value.detach()).any()) for name, value in pipeline_of(model).named_parameters()}
    as_drawn = all(value == (".lora_A." in name) for name, value in values.items() if is_adapter_parameter(name))
    model.eval()
    with torch.no_grad():
        return model(**own_part(model, padded_batches()[0])).loss.item(), as_drawn


def save_base(folder: Path) -> float:
    model = stock_model("gpt2-tied").eval()
    model.save_pretrained(folder)
    return model(**padded_batches()[0]).loss.item()


def test_base_of_an_adapted_model_is_loaded_from_files(tmp_path: Path) -> None:
    (loss,) = run_on_ranks(1, save_base, tmp_path, joins=False)
    for found, as_drawn in run_on_ranks(2, load_base, tmp_path, {"tp": 2}, joins=False):
        assert found == pytest.approx(loss, rel=1e-12)
        assert as_drawn


def refuse(what: str, folder: Path) -> None:
    torch.manual_seed(0)
    name = "gpt2-tied"
    lora = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    configs = {
        "dora": LoraConfig(**lora, use_dora=True),
        "ia3": IA3Config(target_modules=["c_attn"], feedforward_modules=[], fan_in_fan_out=True),
        "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "embedding": LoraConfig(target_modules=["wte"]),
        "head": LoraConfig(target_modules=["lm_head"]),
        "modules_to_save": LoraConfig(**lora, modules_to_save=["ln_f"]),
        "bias": LoraConfig(**lora, bias="all"),
    }
    if what in configs:
        meshtrain.parallelize(get_peft_model(stock_model(name), configs[what]), {})
    elif what == "merged":
        model = get_peft_model(stock_model(name), LoraConfig(**lora))
        model.merge_adapter()
        meshtrain.parallelize(model, {})
    elif what == "too late":
        get_peft_model(meshtrain.parallelize(stock_model(name), {}), LoraConfig(**lora))
    elif what == "nothing to merge":
        meshtrain.save_pretrained(meshtrain.parallelize(stock_model(name), {}), "nowhere", merge_adapters=True)
    elif what == "two formats":
        model = get_peft_model(stock_model(name).bfloat16(), LoraConfig(**lora))
        model.get_base_model().transformer.ln_f.requires_grad_()
        meshtrain.parallelize(model, {})
    elif what == "add_adapter":
        model = stock_model(name)
        model.add_adapter(LoraConfig(**lora))
        meshtrain.save_pretrained(meshtrain.parallelize(model, {}), "nowhere")
    elif what == "pissa":
        model = get_peft_model(
            meshtrain.build_model(load_hf_config(MODELS[name])), LoraConfig(**lora, init_lora_weights=True)
        )
        model.peft_config["default"].init_lora_weights = "pissa"
        meshtrain.initialize(meshtrain.parallelize(model, {}))
    elif what == "nowhere to merge":
        model = adapted("llama-untied", lora_bias=True)
        meshtrain.save_pretrained(meshtrain.parallelize(model, {}), folder / "merged", merge_adapters=True)
    else:
        model = meshtrain.parallelize(get_peft_model(stock_model(name), LoraConfig(**lora)), {})
        if what == "trains beside":
            model.get_base_model().transformer.ln_f.requires_grad_()
        {
            "merge": model.merge_adapter,
            "merge_and_unload": model.merge_and_unload,
            "second": lambda: model.add_adapter("second", LoraConfig(**lora)),
            "half": model.half,
            "load": lambda: model.load_adapter(str(folder), "default"),
            "load tensors": lambda: set_peft_model_state_dict(model, get_peft_model_state_dict(model)),
            "trains beside": lambda: model.save_pretrained(str(folder)),
            "merged by the method": lambda: model.save_pretrained("nowhere", merge_adapters="yes"),
            "tensors": lambda: model.save_pretrained(str(folder), state_dict={}),
            "into None": lambda: model.save_pretrained(None),
            "rank by rank": lambda: meshtrain.save_parallelized(model, "nowhere"),
            "no tokenizer": lambda: meshtrain.save_pretrained(model, folder, tokenizer="nowhere"),
            "no folder": lambda: meshtrain.save_pretrained(model, "/dev/null/adapters"),
            "cast adapters": lambda: meshtrain.save_pretrained(model, "nowhere", dtype=torch.bfloat16),
        }[what]()


MESSAGES = {
    "dora": "has a variant of LoRA (DoraLinearVariant), which cannot be made parallel; let target_modules",
    "ia3": "peft's IA3 cannot be made parallel; use LoraConfig",
    "prompt": "peft's PROMPT_TUNING cannot be made parallel; use LoraConfig",
    "embedding": "transformer.wte has an adapter, but is tied to another module, which would not have one",
    "head": "lm_head has an adapter, but is tied to another module, which would not have one; leave it out",
    "modules_to_save": "transformer.ln_f is peft's ModulesToSaveWrapper, which cannot be made parallel; leave "
    "modules_to",
    "bias": "bias = 'all' of the LoraConfig: peft would save biases",
    "merged": "transformer.h.*.attn.c_attn has an adapter that is merged into its weight; call unmerge_adapter() first",
    "too late": "peft cannot adapt a parallel model, whose projections are cut; adapt the stock model first",
    "pissa": "init_lora_weights = 'pissa' of the adapter of transformer.h.0.attn.c_attn is computed from the weights",
    "merge": "the adapters of a parallel model cannot be added, deleted, unloaded or merged in place",
    "merge_and_unload": "the adapters of a parallel model cannot be added, deleted, unloaded or merged in place",
    "second": "the adapters of a parallel model cannot be added, deleted, unloaded or merged in place",
    "merged by the method": "save_pretrained: merge_adapters is the string 'yes'; pass True or False",
    "tensors": "save_pretrained: state_dict is a dict, and a parallel model writes the values that it has; leave it",
    "into None": "save_pretrained: save_directory is None; pass a path",
    "rank by rank": "a model with LoRA adapters cannot be written rank by rank; use meshtrain.save_pretrained",
    "cast adapters": "dtype is for a full model, but adapters keep theirs; leave it out, or merge_adapters=True",
    "nothing to merge": "merge_adapters = True, but the model has no LoRA adapters; leave it out",
    "add_adapter": "the adapters were put on the model by its own add_adapter, which cannot save them",
    "no tokenizer": "tokenizer = 'nowhere' is not a directory with a tokenizer; pass one, or the tokenizer itself",
    "no folder": "/dev/null/adapters: cannot write its lock: Not a directory; make room, or write into another folder",
    "two formats": "the trained parameters have several number formats, bfloat16 (transformer.ln_f.bias) and float32 (",
    "load": "adapters cannot be loaded into a parallel model, whose parameters are cut; load them before",
    "load tensors": "adapters cannot be loaded into a parallel model, whose parameters are cut; load them before",
    "trains beside": "transformer.ln_f.weight, transformer.ln_f.bias would not be saved: these parameters are trained",
    "nowhere to merge": "the adapters have biases (lora_bias) where the model has none (model.layers.0.self_attn.",
    "half": "a parallel model cannot be moved (to cpu, torch.float16)",
}


def refuse_all(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the message of each mistake."""
    warnings.simplefilter("ignore")
    refusals = {}
    for what in MESSAGES:
        with pytest.raises(UserError) as error:
            refuse(what, folder)
        refusals[what] = error.value.lines
    return refusals


def test_unsupported_adapters_are_refused(tmp_path: Path) -> None:
    (refusals,) = run_on_ranks(1, refuse_all, tmp_path, joins=False)
    for what, message in MESSAGES.items():
        assert len(refusals[what]) == 1
        assert message in refusals[what][0]


def refuse_different_adapters() -> list[str]:
    """Return the messages for differences between ranks that no weight shows."""
    rank, refusals = torch.distributed.get_rank(), []
    thawed = adapted("gpt2-tied")
    thawed.get_base_model().transformer.ln_f.bias.requires_grad_(rank == 1)
    for model in (thawed, adapted("gpt2-tied", lora_alpha=4 + 4 * rank)):
        with pytest.raises(UserError) as error:
            meshtrain.parallelize(model, {"mesh": {"tp": 2}})
        refusals.append(str(error.value))
    return refusals


def test_different_adapters_on_ranks_are_refused() -> None:
    thawed, scaled = run_on_ranks(2, refuse_different_adapters)[0]
    assert re.search(
        r"ranks 0 and 1 pass models that differ in 1 of \d+ values: transformer.ln_f.bias is float64 \(32,\) frozen, "
        r"hash (\w+) and float64 \(32,\) trained, hash \1; .*, freeze and adapt them alike",
        thawed,
    )
    assert "the scaling of transformer.h.0.attn.c_attn is {'default': 1.0} and {'default': 2.0}; " in scaled
