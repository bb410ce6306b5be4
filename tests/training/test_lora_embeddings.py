"""Adapters of embeddings, whose vocabulary tp divides."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from meshtrain.config.lora import LoraConfig
from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.errors import ModelError
from meshtrain.inference.prompts import Decoding, generate_texts
from meshtrain.training.resolve import resolve_run
from tests.training.lora_runs import check_exports, lora_run, prove, train, write_base

TARGETS = ["embed_tokens", "q_proj", "down_proj"]
LORA = LoraConfig(rank=4, alpha=8, target_modules=TARGETS)
# One process of tp has a row of the vocabulary more than the other.
UNEVEN = {"tie_word_embeddings": False, "vocab_size": 301}


def test_adapters_of_embeddings_train_as_in_peft(tmp_path: Path) -> None:
    write_base(tmp_path, **UNEVEN)
    prove(tmp_path, LORA, target_modules=TARGETS)


def test_export_is_loaded_by_peft_and_merged(tmp_path: Path) -> None:
    write_base(tmp_path, **UNEVEN)
    optimizer = OptimizerConfig(learning_rate=0.05)
    for steps, mesh in ((2, (2, 1, 1, 2)), (3, (1, 1, 2, 1))):
        train(lora_run(tmp_path, mesh, lora=LORA, steps=steps, optimizer=optimizer))
    check_exports(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64))
    texts = [
        generate_texts(str(tmp_path / it), ["model reads"], Decoding(8, temperature=0.0)) for it in ("run", "merged")
    ]
    assert texts[0] == texts[1]


def test_adapter_of_a_tied_embedding_is_refused(tmp_path: Path) -> None:
    write_base(tmp_path)
    with pytest.raises(ModelError) as caught:
        resolve_run(lora_run(tmp_path, (1, 1, 1, 1), lora=LORA))
    assert "model.embed_tokens has an adapter, but is tied to another module, which would not have one; leave" in str(
        caught.value
    )
