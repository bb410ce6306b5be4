"""Adapters that also learn the lengths of the rows of a weight (`lora.dora`)."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from meshtrain.config.lora import LoraConfig
from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.config.plan import PipelinePlan
from meshtrain.errors import ConfigError
from meshtrain.training.resolve import resolve_run
from tests.training.lora_runs import (
    MESHES,
    check_counts,
    check_exports,
    compiled_losses,
    lora_run,
    prove,
    train,
    write_base,
)
from tests.training.runs import DRY, GPT2, VOCABULARY, read_checkpoint

LORA = LoraConfig(rank=4, alpha=8, dora=True)
FAST = OptimizerConfig(learning_rate=0.05)


def test_magnitudes_train_as_in_peft(tmp_path: Path) -> None:
    write_base(tmp_path, attention_bias=True)
    prove(tmp_path, LORA, use_dora=True)


def test_magnitudes_of_parts_and_of_parts_of_the_sequence(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **GPT2, **DRY)).double()
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    base.save_pretrained(tmp_path / "base")
    losses = []
    for number, mesh in enumerate([(1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 1, 2), (2, 1, 1, 2)]):
        run = lora_run(
            tmp_path, mesh, name="run" if number == 3 else f"run{number}", lora=LORA, steps=3, optimizer=FAST
        )
        tensor = run.plan.tensor.model_copy(update={"sequence_parallel": number == 2})
        losses.append(train(run.model_copy(update={"plan": run.plan.model_copy(update={"tensor": tensor})})))
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=1e-11)
    check_exports(tmp_path, GPT2LMHeadModel.from_pretrained(tmp_path / "base", dtype=torch.float64).eval())


def test_magnitudes_train_where_the_backward_pass_is_split(tmp_path: Path) -> None:
    write_base(tmp_path)
    losses = []
    for number, mesh in enumerate([(1, 1, 1, 1), (2, 1, 1, 1)]):
        run = lora_run(tmp_path, mesh, name=f"run{number}", lora=LORA, steps=3, optimizer=FAST)
        if number:
            pipeline = PipelinePlan(schedule="ZBVZeroBubble", stages_per_rank=2)
            run = run.model_copy(update={"plan": run.plan.model_copy(update={"pipeline": pipeline})})
        losses.append(train(run))
    assert losses[1] == pytest.approx(losses[0], rel=1e-11)


def test_compiled_and_recomputed_layers_compute_the_same(tmp_path: Path) -> None:
    write_base(tmp_path)
    wanted, found = (compiled_losses(tmp_path, LORA, (1, 1, 1, 2), is_compiled=it) for it in (False, True))
    assert found == pytest.approx(wanted, rel=1e-12)


def test_run_resumes_on_other_meshes_and_is_exported(tmp_path: Path) -> None:
    write_base(tmp_path)
    wanted = train(lora_run(tmp_path, (1, 1, 1, 1), name="whole", lora=LORA, steps=4, optimizer=FAST))
    for steps, mesh in zip((1, 2, 4), [MESHES[4], MESHES[0], MESHES[2]], strict=True):
        found = train(lora_run(tmp_path, mesh, lora=LORA, steps=steps, optimizer=FAST))
    assert found == pytest.approx(wanted, rel=1e-11)
    assert any("lora_magnitude_vector" in name for name in read_checkpoint(tmp_path / "run"))
    check_exports(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64))


def test_magnitudes_are_counted(tmp_path: Path) -> None:
    write_base(tmp_path)
    check_counts(lora_run(tmp_path, (1, 1, 1, 2), lora=LORA))


def test_magnitudes_of_embeddings_are_refused(tmp_path: Path) -> None:
    write_base(tmp_path, tie_word_embeddings=False)
    lora = LoraConfig(rank=4, dora=True, target_modules=["embed_tokens"])
    with pytest.raises(ConfigError, match=r"'embed_tokens' names the embedding model\.embed_tokens, and lora\.dora is"):
        resolve_run(lora_run(tmp_path, (1, 1, 1, 1), lora=lora))
