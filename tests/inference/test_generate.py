"""Generate text from an exported model and from a checkpoint."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from meshtrain import cli
from meshtrain.checkpoint.huggingface.convert import convert
from meshtrain.config.toml import load_plan
from meshtrain.errors import ConfigError, ModelError, UserError
from meshtrain.inference.prompts import Decoding, generate_texts
from tests.ranks import RankError, run_on_ranks

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
        vocab_size=end + 1, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=end, eos_token_id=end
    )
    config.initializer_range = 0.3
    GPT2LMHeadModel(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory with a checkpoint of the weights in `folder`."""
    path = tmp_path_factory.mktemp("run")
    convert(folder, path / "checkpoints")
    return path


def generate(
    folder: Path, prompt: str = PROMPT, *, tokens: int = 12, temperature: float | None = 0.0, **how: Any
) -> str:
    (text,) = generate_texts(str(folder), [prompt], Decoding(tokens, temperature=temperature, **how))
    return text


def test_zero_temperature_takes_the_most_likely_token(folder: Path) -> None:
    model = GPT2LMHeadModel.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    for _ in range(12):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert generate(folder) == tokenizer.decode(ids[0])
    assert generate(folder, seed=1) == generate(folder)
    assert generate(folder).startswith(PROMPT)


def test_samples_depend_on_the_seed_and_leave_the_global_generator_unchanged(folder: Path) -> None:
    state = torch.random.get_rng_state()
    assert generate(folder, temperature=1.0, seed=3) == generate(folder, temperature=1.0, seed=3)
    assert generate(folder, temperature=1.0, seed=3) != generate(folder, temperature=1.0, seed=4)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_empty_or_too_long_prompt_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="the prompt is empty; pass the words"):
        generate(folder, "")
    with pytest.raises(
        UserError,
        match=r"a prompt of 30 tokens with 12 more is asked for, but the model has 32 positions; ask for at most 2 "
        "or shorten the prompt",
    ):
        generate(folder, "x" * 30)


def test_folder_without_weights_or_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(
        ModelError, match=f"{tmp_path} does not hold a complete model with its tokenizer: .*; export it again"
    ):
        generate(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(
        ModelError, match=f"the tokenizer in {tmp_path} turns the prompt into no tokens; check that its files are there"
    ):
        generate(tmp_path)


def test_folder_with_broken_or_missing_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    os.truncate(weights, weights.stat().st_size - 10)
    with pytest.raises(
        ModelError, match=f"{tmp_path} does not hold a complete model with its tokenizer: .*; export it again"
    ):
        generate(tmp_path)
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(ModelError) as refused:
        generate(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path} lacks weights of the model (1): {lost}; use a folder that has ")


def test_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=rf"^{tmp_path} holds neither a Hugging Face model \(no config.json\) nor a checkpoint \(.*\)$"
    ):
        generate(tmp_path)


PROMPTS = ["def f", "import os"]
DRAWN = Decoding(10, temperature=1.1, top_k=50, top_p=0.9, seed=4)
SEVERAL = [
    (2, ["mesh.tp=2"]),
    (2, ["mesh.pp=2"]),
    (4, ["mesh.pp=2", "mesh.tp=2"]),
    (2, ["mesh.dp_shard=2"]),
    (2, ["mesh.cp=2", "mesh.dp_shard=1"]),
]


def generate_here(source: Path, decoding: Decoding, overrides: list[str]) -> list[str]:
    return generate_texts(str(source), PROMPTS, decoding, load_plan(None, overrides) if overrides else None)


@pytest.mark.parametrize(("world_size", "overrides"), SEVERAL, ids=str)
def test_any_mesh_generates_the_text_of_one_process(
    folder: Path, run: Path, world_size: int, overrides: list[str]
) -> None:
    expected = generate_texts(str(folder), PROMPTS, DRAWN)
    assert [text[: len(prompt)] for text, prompt in zip(expected, PROMPTS, strict=True)] == PROMPTS
    source = folder if overrides == ["mesh.pp=2"] else run
    assert run_on_ranks(world_size, generate_here, source, DRAWN, overrides, joins=False) == [expected] * world_size


def test_checkpoint_generates_the_text_of_its_export(folder: Path, run: Path) -> None:
    for decoding in (DRAWN, Decoding(10, num_beams=3), Decoding(10, temperature=0.0)):
        expected = generate_texts(str(folder), PROMPTS, decoding)
        for source in (run, run / "checkpoints" / "step-0"):
            assert run_on_ranks(1, generate_here, source, decoding, [], joins=False) == [expected]
    assert expected == [generate(folder, prompt, tokens=10) for prompt in PROMPTS]


def test_several_processes_without_a_plan_are_refused(run: Path) -> None:
    with pytest.raises(RankError) as failed:
        run_on_ranks(2, generate_here, run, DRAWN, [], joins=False)
    assert isinstance(failed.value.original, ConfigError)
    assert str(failed.value.original) == (
        "2 processes are started, but there is no plan for them; add mesh.tp=2 (or mesh.pp=2), or --plan FILE, or "
        "start one process"
    )


def test_contradicting_options_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"^--num-beams 3 follows the likeliest texts, and --temperature 0.5 draws; "):
        generate(folder, temperature=0.5, num_beams=3)
    for how in ({"top_k": 3}, {"top_p": 0.5}, {"top_k": 3, "num_beams": 2, "temperature": None}):
        with pytest.raises(UserError, match=r"^--top-k and --top-p limit the tokens to draw from, and without a temp"):
            generate(folder, **how)


def test_checkpoint_without_a_tokenizer_is_refused(run: Path, tmp_path: Path) -> None:
    bare = tmp_path / "step-0"
    shutil.copytree(run / "checkpoints" / "step-0", bare)
    for file in (bare / "huggingface").glob("tokenizer*"):
        file.write_text("{")
    with pytest.raises(ModelError, match=f"^{bare} holds no tokenizer: "):
        generate(bare)


def test_command_prints_every_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-new-tokens", "10", "--num-beams", "3"]
    assert cli._exit_code(["generate", str(folder), "--prompt", PROMPTS[0], "--prompt", PROMPTS[1], *options]) == 0
    expected = generate_texts(str(folder), PROMPTS, Decoding(10, num_beams=3))
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)
    assert cli._exit_code(["generate", str(folder), "mesh.tpp=2", "--prompt", PROMPTS[0]]) == 2
    assert "mesh.tpp" in capsys.readouterr().err
