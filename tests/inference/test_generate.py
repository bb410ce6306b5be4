"""Text from an exported model."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from meshtrain.checkpoint.directory import write_manifest
from meshtrain.errors import ModelError, UserError
from meshtrain.inference.generate import generate_text
from tests.checkpoint.stages import manifest_of

PROMPT = "def f"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported")
    letters = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=letters | {"<end>": len(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(path)
    torch.manual_seed(0)
    end = len(letters)
    config = GPT2Config(
        vocab_size=end + 1, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=end, eos_token_id=end
    )
    config.initializer_range = 0.3
    GPT2LMHeadModel(config).save_pretrained(path)
    return path


def generate(folder: Path, prompt: str = PROMPT, *, tokens: int = 12, temperature: float = 0.0, seed: int = 0) -> str:
    return generate_text(folder, prompt, max_new_tokens=tokens, temperature=temperature, seed=seed)


def test_without_temperature_the_likeliest_token_is_taken(folder: Path) -> None:
    model = GPT2LMHeadModel.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    for _ in range(12):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert generate(folder) == tokenizer.decode(ids[0])
    assert generate(folder, seed=1) == generate(folder)
    assert generate(folder).startswith(PROMPT)


def test_draws_follow_the_seed_and_leave_the_caller_alone(folder: Path) -> None:
    state = torch.random.get_rng_state()
    assert generate(folder, temperature=1.0, seed=3) == generate(folder, temperature=1.0, seed=3)
    assert generate(folder, temperature=1.0, seed=3) != generate(folder, temperature=1.0, seed=4)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_an_empty_or_too_long_prompt_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="the prompt is empty; give the words"):
        generate(folder, "")
    with pytest.raises(
        UserError,
        match=r"has 30 tokens and 12 more are asked for, but the model has 32 positions; ask for at most 2 "
        "or shorten the prompt",
    ):
        generate(folder, "x" * 30)


def test_half_a_model_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ModelError, match=f"{tmp_path} holds no whole model with its tokenizer: .*; export it again"):
        generate(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(
        ModelError, match=f"the tokenizer in {tmp_path} turns the prompt into no tokens; are its files there"
    ):
        generate(tmp_path)


def test_what_is_no_exported_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"holds no exported model \(no config.json\); run `meshtrain export CHECKPOINT FOLDER` first"
    ):
        generate(tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step-3"
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, manifest_of(3))
    for folder in (tmp_path, checkpoint):
        with pytest.raises(
            ModelError, match=f"{folder} holds a meshtrain checkpoint, .* run `meshtrain export {checkpoint} FOLDER`"
        ):
            generate(folder)
