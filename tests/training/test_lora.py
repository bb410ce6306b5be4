"""LoRA adapters of a run: exact on every mesh, saved alone, resumed, exported and refused."""

import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3ForCausalLM

from meshtrain.checkpoint.manifest import read_manifest
from meshtrain.config.lora import LoraConfig
from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.config.plan import PrecisionPlan
from meshtrain.config.run import ModelConfig
from meshtrain.config.toml import load_run
from meshtrain.errors import CheckpointError, ConfigError, ModelError
from meshtrain.inference.lora import export
from meshtrain.inference.prompts import Decoding, generate_texts
from meshtrain.models import lora
from meshtrain.runtime.ranks import RankError
from meshtrain.training.resolve import resolve_run
from tests.ranks import run_on_ranks
from tests.training.lora_runs import (
    CONTEXT,
    MESHES,
    check_counts,
    logits_of,
    lora_run,
    refusal,
    stock_losses,
    train,
    write_base,
)
from tests.training.runs import (
    GPT2,
    LLAMA_TEXT,
    RUN_TEXT,
    VOCABULARY,
    build_plan,
    build_run,
    read_checkpoint,
    write_text,
)
from tests.wholes import write_whole


def test_every_mesh_trains_as_peft_does_in_one_process(tmp_path: Path) -> None:
    write_base(tmp_path)
    (wanted,) = run_on_ranks(1, stock_losses, lora_run(tmp_path, (1, 1, 1, 1), name="one", steps=3), joins=False)
    for number, mesh in enumerate(MESHES):
        found = train(lora_run(tmp_path, mesh, name=f"run{number}", steps=3))
        assert found == pytest.approx(wanted, rel=1e-12)
    run = lora_run(tmp_path, MESHES[0], name="context", steps=3)
    found = train(run.model_copy(update={"plan": run.plan.model_copy(update={"mesh": CONTEXT})}))
    assert found == pytest.approx(wanted, rel=1e-12)


def test_adapters_of_a_model_in_bfloat16_train_in_float32(tmp_path: Path) -> None:
    write_base(tmp_path)
    precision = PrecisionPlan(parameters="bfloat16", compute="bfloat16", reduce="float32")
    run = lora_run(tmp_path, (1, 1, 2, 1), steps=2)
    train(run.model_copy(update={"plan": run.plan.model_copy(update={"precision": precision})}))
    formats = {name.rpartition(".")[2]: it.dtype for name, it in read_checkpoint(tmp_path / "run").items()}
    assert formats == {"weight": torch.float32}
    resumed = lora_run(tmp_path, (1, 1, 1, 2), steps=3)
    losses = train(resumed.model_copy(update={"plan": resumed.plan.model_copy(update={"precision": precision})}))
    assert losses[2] < losses[0]


def test_run_resumes_on_other_meshes_and_saves_adapters_alone(tmp_path: Path) -> None:
    write_base(tmp_path)
    lora = LoraConfig(rank=4, target_modules=["q_proj", "down_proj"], rank_stabilized=True)
    wanted = train(lora_run(tmp_path, (1, 1, 1, 1), name="whole", lora=lora, steps=4))
    for steps, mesh in zip((1, 2, 4), MESHES[1:], strict=False):
        found = train(lora_run(tmp_path, mesh, lora=lora, steps=steps))
    assert found == pytest.approx(wanted, rel=1e-12)
    assert all("lora_" in name for name in read_checkpoint(tmp_path / "run"))


def test_dropout_of_adapters_is_that_of_the_step(tmp_path: Path) -> None:
    write_base(tmp_path)
    lora = LoraConfig(rank=4, dropout=0.25)
    wanted = train(lora_run(tmp_path, (1, 1, 1, 2), name="whole", lora=lora, steps=2))
    for steps in (1, 2):
        found = train(lora_run(tmp_path, (1, 1, 1, 2), lora=lora, steps=steps))
    assert found == wanted
    assert found[1] != train(lora_run(tmp_path, (1, 1, 1, 2), name="dry", steps=2))[1]


def test_export_is_loaded_by_peft_and_merged(tmp_path: Path) -> None:
    write_base(tmp_path)
    train(lora_run(tmp_path, (1, 1, 1, 2), steps=3))
    export(str(tmp_path / "run"), tmp_path / "adapters")
    export(str(tmp_path / "run"), tmp_path / "merged", merge_adapters=True)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    before = logits_of(base)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapters")).double()
    assert adapted.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    torch.testing.assert_close(logits_of(adapted), logits_of(merged), rtol=1e-12, atol=1e-12)
    assert (before - logits_of(merged)).abs().max() > 0.01


def test_parts_of_a_fused_projection_are_exported_as_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **GPT2)).double().save_pretrained(tmp_path / "base")
    train(lora_run(tmp_path, (1, 1, 1, 2), steps=2))
    export(str(tmp_path / "run"), tmp_path / "adapters")
    export(str(tmp_path / "run"), tmp_path / "merged", merge_adapters=True)
    base = GPT2LMHeadModel.from_pretrained(tmp_path / "base", dtype=torch.float64).eval()
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapters")).double().eval()
    merged = GPT2LMHeadModel.from_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
    torch.testing.assert_close(logits_of(adapted), logits_of(merged), rtol=1e-12, atol=1e-12)


def test_checksum_of_the_base_does_not_depend_on_the_parts_of_projections(tmp_path: Path) -> None:
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **GPT2)).double().save_pretrained(tmp_path / "base")
    lora, checksums = LoraConfig(rank=4, target_modules=["c_fc"]), set()
    for steps, parts, mesh in ((1, "qkv", (1, 1, 2, 1)), (2, ("query", "key", "value"), (1, 1, 1, 1))):
        run = lora_run(tmp_path, mesh, lora=lora, steps=steps)
        tensor = run.plan.tensor.model_copy(update={"fused": {"transformer.h.*.attn.c_attn": list(parts)}})
        train(run.model_copy(update={"plan": run.plan.model_copy(update={"tensor": tensor})}))
        base = read_manifest(tmp_path / f"run/checkpoints/step-{steps}").base
        assert base is not None
        checksums.add(base.checksum)
    assert len(checksums) == 1


def merge(run: Path, folder: Path) -> None:
    export(str(run), folder, merge_adapters=True)


def test_other_base_or_other_adapters_are_refused(tmp_path: Path) -> None:
    write_base(tmp_path)
    train(lora_run(tmp_path, (1, 1, 1, 1), steps=1))
    # The settings that it started with are compared first.
    (tmp_path / "run/run.toml").unlink()
    other = refusal(lora_run(tmp_path, (1, 1, 1, 1), steps=2, lora=LoraConfig(rank=8)))
    assert "lora.rank is 4 in the checkpoint and 8 in this run" in str(other)
    write_base(tmp_path, seed=1)
    changed = refusal(lora_run(tmp_path, (1, 1, 1, 1), steps=2))
    assert isinstance(changed, CheckpointError)
    assert "its adapters were trained on other weights than those in" in str(changed)
    with pytest.raises(RankError, match="trained on other weights"):
        run_on_ranks(1, merge, tmp_path / "run", tmp_path / "merged", joins=False)
    assert not (tmp_path / "merged").exists()


def test_run_from_adapters_alone_is_refused(tmp_path: Path) -> None:
    write_base(tmp_path)
    train(lora_run(tmp_path, (1, 1, 1, 1), steps=1))
    model = ModelConfig(path=str(tmp_path / "run/checkpoints/step-1"), weights="pretrained")
    run = build_run(tmp_path / "next", "qwen3", build_plan((1, 1, 1, 1))).model_copy(update={"model": model})
    with pytest.raises(ModelError, match="step-1 holds adapters alone; export it with --merge-adapters"):
        resolve_run(run)


def test_text_is_generated_from_adapters_beside_their_base(tmp_path: Path) -> None:
    write_base(tmp_path)
    train(lora_run(tmp_path, (1, 1, 1, 1), steps=6, optimizer=OptimizerConfig(learning_rate=0.5)))
    export(str(tmp_path / "run"), tmp_path / "merged", merge_adapters=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "merged" / name, tmp_path / "base")
    decoding = Decoding(8, temperature=0.0)
    texts = [generate_texts(str(tmp_path / name), ["model reads"], decoding) for name in ("run", "merged", "base")]
    assert texts[0] == texts[1] != texts[2]


def test_merging_a_full_model_is_refused(tmp_path: Path) -> None:
    train(build_run(tmp_path / "run", "qwen3", build_plan((1, 1, 1, 1)), steps=1))
    with pytest.raises(CheckpointError, match="holds a full model, and no adapters; leave it out"):
        export(str(tmp_path / "run"), tmp_path / "out", merge_adapters=True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["lora.alpha=8"], "`lora` sets `alpha`, but without `lora.rank` there are no adapters; set it"),
        (["lora.rank=4"], "`lora.rank` = 4 trains adapters beside frozen weights, and `model.weights` is 'random'"),
        (["lora.rank=0"], "lora.rank"),
        (["lora.rank=4", "lora.dropout=1.0"], "lora.dropout"),
    ],
)
def test_contradictory_settings_are_refused(keys: list[str], message: str, tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl")
    (tmp_path / "run.toml").write_text(RUN_TEXT + LLAMA_TEXT)
    with pytest.raises(ConfigError) as caught:
        load_run(str(tmp_path / "run.toml"), keys)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["model.enlarge_vocabulary=true"], "`model.enlarge_vocabulary` = true adds rows that should train, and"),
        (["optimizer.name=muon"], "`optimizer` has the optimizer 'muon', and `lora.rank` trains adapters alone"),
        (
            ['optimizer.groups=[{parameters=["model.norm"], frozen=true}]'],
            "`optimizer` has frozen groups, and `lora.rank` trains adapters alone; leave out one of them",
        ),
        (["ema.decay=0.9"], "`ema.decay` averages the weights, and `lora.rank` trains adapters, whose average"),
        (["router.bias_update_rate=0.1"], "`router.bias_update_rate` changes the model, which `lora.rank` freezes"),
        (['lora.target_modules=["q_proj", "q_proj"]'], "`target_modules` names 'q_proj' twice; leave one out"),
        (['lora.modules_to_save=["norm", "norm"]'], "`modules_to_save` names 'norm' twice; leave one out"),
        (
            ["lora.dora=true", 'lora.base="nf4"'],
            "`dora` = true needs the lengths of full weights, and `base` = 'nf4' packs",
        ),
        (["lora.dora=true", "lora.dropout=0.1"], "`dropout` = 0.1 would need a second output; leave out one of them"),
    ],
)
def test_what_adapters_exclude_is_refused(keys: list[str], message: str, tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl")
    start = '[model]\npath = "base"\nweights = "pretrained"\n[lora]\nrank = 4\n'
    text = RUN_TEXT.replace("{ vocab_size = 300 }", '{ path = "base" }')
    (tmp_path / "run.toml").write_text(text + start)
    with pytest.raises(ConfigError) as caught:
        load_run(str(tmp_path / "run.toml"), keys)
    assert message in str(caught.value)


def test_adapters_on_a_checkpoint_or_on_a_language_half_are_refused(tmp_path: Path) -> None:
    train(build_run(tmp_path / "full", "qwen3", build_plan((1, 1, 1, 1)), steps=1))
    run = lora_run(tmp_path, (1, 1, 1, 1))
    path = tmp_path / "full/checkpoints/step-1"
    with pytest.raises(ConfigError, match="is a checkpoint, which no other program can put adapters on; export it"):
        resolve_run(run.model_copy(update={"model": ModelConfig(path=str(path), weights="pretrained")}))
    write_whole(tmp_path / "whole", "gemma3")
    with pytest.raises(ModelError, match="the model is the language half of a multimodal one"):
        resolve_run(run.model_copy(update={"model": ModelConfig(path=str(tmp_path / "whole"), weights="pretrained")}))


def test_options_that_adapters_cannot_have_are_refused(tmp_path: Path) -> None:
    write_base(tmp_path)
    train(lora_run(tmp_path, (1, 1, 1, 1), steps=1))
    with pytest.raises(CheckpointError, match="--dtype float32 is for a full model, but adapters keep theirs"):
        export(str(tmp_path / "run"), tmp_path / "out", dtype="float32")
    with pytest.raises(CheckpointError, match="holds adapters, which have no average; leave it out"):
        export(str(tmp_path / "run"), tmp_path / "out", ema=True)


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_base(tmp_path)
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        resolve_run(lora_run(tmp_path, (1, 1, 1, 1)))
    assert caught.value.lines == ("`lora.rank` is set, but peft is not installed; pip install meshtrain[lora]",)


def test_unknown_target_is_refused(tmp_path: Path) -> None:
    write_base(tmp_path)
    run = lora_run(tmp_path, (1, 1, 1, 1), lora=LoraConfig(rank=4, target_modules=["q_proj", "v_prj"]))
    with pytest.raises(ConfigError) as caught:
        resolve_run(run)
    assert caught.value.lines == (
        "lora.target_modules: 'v_prj' is the end of no module's name; the nearest is 'v_proj'",
    )


def test_target_that_is_no_projection_is_refused(tmp_path: Path) -> None:
    write_base(tmp_path)
    run = lora_run(tmp_path, (1, 1, 1, 1), lora=LoraConfig(rank=4, target_modules=["self_attn"]))
    with pytest.raises(ConfigError) as caught:
        resolve_run(run)
    assert "'self_attn' names model.layers.0.self_attn, which is a Qwen3Attention; name" in str(caught.value)


@pytest.mark.parametrize("merged", [True, False], ids=["adapters", "full"])
def test_export_has_the_number_format_of_the_base(tmp_path: Path, merged: bool) -> None:
    write_base(tmp_path)
    base = Qwen3ForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    run = lora_run(tmp_path, (1, 1, 1, 1), steps=1)
    train(run if merged else run.model_copy(update={"lora": LoraConfig()}))
    export(str(tmp_path / "run"), tmp_path / "out", merge_adapters=merged)
    found = load_file(tmp_path / "out/model.safetensors")
    assert {it.dtype for it in found.values()} == {torch.bfloat16}


def test_adapters_are_counted(tmp_path: Path) -> None:
    write_base(tmp_path)
    check_counts(lora_run(tmp_path, (1, 1, 1, 2)))
