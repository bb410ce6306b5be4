"""Modules that train in full beside the adapters of a run (`lora.modules_to_save`)."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from meshtrain.config.lora import LoraConfig
from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.config.plan import PrecisionPlan
from meshtrain.errors import ConfigError
from meshtrain.inference.lora import export
from meshtrain.inference.prompts import Decoding, generate_texts
from meshtrain.training.report import plan_table
from meshtrain.training.resolve import resolve_run
from tests.training.lora_runs import MESHES, check_counts, check_exports, lora_run, prove, train, write_base
from tests.training.runs import GPT2, VOCABULARY, read_checkpoint

RUN_BASE = "run", "base"
UNTIED = {"tie_word_embeddings": False}
HEAD = LoraConfig(rank=4, alpha=8, modules_to_save=["lm_head", "norm"])
TIED = LoraConfig(rank=4, alpha=8, modules_to_save=["embed_tokens"])


def test_head_and_norm_train_as_in_peft(tmp_path: Path) -> None:
    write_base(tmp_path, **UNTIED)
    prove(tmp_path, HEAD, modules_to_save=["lm_head", "model.norm"])


def test_tied_embedding_and_head_train_together(tmp_path: Path) -> None:
    write_base(tmp_path)
    prove(tmp_path, TIED, modules_to_save=["embed_tokens"], ensure_weight_tying=True)


def test_run_resumes_on_other_meshes_and_saves_what_trains(tmp_path: Path) -> None:
    write_base(tmp_path)
    wanted = train(lora_run(tmp_path, (1, 1, 1, 1), name="whole", lora=TIED, steps=5))
    for steps, mesh in zip((1, 2, 3, 5), [MESHES[4], *MESHES[:3]], strict=True):
        found = train(lora_run(tmp_path, mesh, lora=TIED, steps=steps))
    assert found == pytest.approx(wanted, rel=1e-12)
    saved = [name for name in read_checkpoint(tmp_path / "run") if name.startswith("model.") and "lora_" not in name]
    assert saved == ["model.model.embed_tokens.weight"]


@pytest.mark.parametrize("lora", [HEAD, TIED], ids=["head", "tied"])
def test_export_is_loaded_by_peft_and_merged(tmp_path: Path, lora: LoraConfig) -> None:
    write_base(tmp_path, **({} if lora is TIED else UNTIED))
    train(lora_run(tmp_path, (2, 1, 1, 2), lora=lora, steps=3, optimizer=OptimizerConfig(learning_rate=0.01)))
    check_exports(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64))
    # Only the last norm ends in ".norm", and peft would find the norms of the layers too.
    found = [name for name in load_file(tmp_path / "adapters/adapter_model.safetensors") if "lora_" not in name]
    prefix = "base_model.model."
    wanted = ["lm_head", "model.norm"] if lora is HEAD else ["lm_head", "model.embed_tokens"]
    assert sorted(found) == [f"{prefix}{name}.weight" for name in wanted]


def test_tied_and_fused_modules_of_gpt2_are_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **GPT2)).double().save_pretrained(tmp_path / "base")
    lora = LoraConfig(rank=4, target_modules=["c_fc"], modules_to_save=["wte", "0.attn.c_attn", "ln_f"])
    train(lora_run(tmp_path, (2, 1, 1, 2), lora=lora, steps=2, optimizer=OptimizerConfig(learning_rate=0.01)))
    check_exports(tmp_path, GPT2LMHeadModel.from_pretrained(tmp_path / "base", dtype=torch.float64).eval())


def test_text_is_generated_with_what_trained(tmp_path: Path) -> None:
    write_base(tmp_path)
    bfloat16 = PrecisionPlan(parameters="bfloat16", compute="bfloat16", reduce="float32")
    run = lora_run(tmp_path, (1, 1, 1, 1), lora=TIED, steps=6, optimizer=OptimizerConfig(learning_rate=0.1))
    train(run.model_copy(update={"plan": run.plan.model_copy(update={"precision": bfloat16})}))
    assert {it.dtype for it in read_checkpoint(tmp_path / "run").values()} == {torch.float32}
    export(str(tmp_path / "run"), tmp_path / "adapters")
    assert {it.dtype for it in load_file(tmp_path / "adapters/adapter_model.safetensors").values()} == {torch.float32}
    export(str(tmp_path / "run"), tmp_path / "merged", merge_adapters=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "merged" / name, tmp_path / "base")
    texts = [generate_texts(str(tmp_path / name), ["model reads"], Decoding(8, temperature=0.0)) for name in RUN_BASE]
    assert texts[0] != texts[1]


def test_what_trains_in_full_is_counted_and_shown(tmp_path: Path) -> None:
    write_base(tmp_path)
    resolved = check_counts(lora_run(tmp_path, (1, 1, 1, 2), lora=TIED))
    shown = dict(plan_table(resolved).rows)["adapters"]
    assert "up_proj, v_proj, embed_tokens in full: 17,536 parameters train (" in shown


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["lm_haed"], "'lm_haed' is the end of no module's name; the nearest is 'lm_head'"),
        (["q_proj"], "'q_proj' names model.layers.0.self_attn.q_proj, which has an adapter; leave it out here or in"),
        (["mlp"], "'mlp' names model.layers.0.mlp, a Qwen3MLP, which cannot train and be saved as a whole; name"),
        (["rotary_emb"], "'rotary_emb' names model.rotary_emb, a Qwen3RotaryEmbedding, which cannot train"),
    ],
)
def test_modules_that_cannot_be_saved_are_refused(tmp_path: Path, targets: list[str], message: str) -> None:
    write_base(tmp_path)
    with pytest.raises(ConfigError) as caught:
        resolve_run(lora_run(tmp_path, (1, 1, 1, 1), lora=LoraConfig(rank=4, modules_to_save=targets)))
    assert f"lora.modules_to_save: {message}" in str(caught.value)


def test_modules_in_float32_need_a_step_that_casts(tmp_path: Path) -> None:
    write_base(tmp_path)
    run = lora_run(tmp_path, (1, 1, 1, 1), lora=TIED)
    bfloat16 = PrecisionPlan(parameters="bfloat16", compute="bfloat16", reduce="bfloat16")
    with pytest.raises(ConfigError, match=r"leaves no step that casts; set plan.precision.reduce = 'float32'"):
        resolve_run(run.model_copy(update={"plan": run.plan.model_copy(update={"precision": bfloat16})}))
