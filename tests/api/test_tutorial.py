"""The GPT-2 tutorial of OSLO, line by line: generate, train, save, load on other meshes, merge."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import meshtrain
from meshtrain import cli
from tests.api.folders import byte_tokenizer
from tests.api.programs import full_parameters, parallel
from tests.casts import lift_float32_casts
from tests.ranks import run_on_ranks

PROMPT = "I don't want a lot for Christmas. There is just one thing"
LINES = [f"{'word ' * (1 + number % 5)}number {number} of the tutorial, which is text" for number in range(32)]
STEPS, BATCH_SIZE, SEQ_LEN = 8, 4, 64


def generate_text(model: Any, tokenizer: PreTrainedTokenizerFast) -> str:
    tokens = tokenizer(PROMPT, return_tensors="pt")
    return str(tokenizer.decode(model.generate(**tokens, num_beams=3, max_new_tokens=20)[0]))


def train(model: Any, optimizer: torch.optim.Optimizer, tokenizer: PreTrainedTokenizerFast) -> list[float]:
    losses = []
    model.train()
    for start in range(0, STEPS * BATCH_SIZE, BATCH_SIZE):
        optimizer.zero_grad()
        lines = LINES[start : start + BATCH_SIZE]
        batch = tokenizer(lines, return_tensors="pt", padding=True, truncation=True, max_length=SEQ_LEN)
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


def run_tutorial(folder: Path, out: Path, tp: int) -> tuple[str, str, list[float], str, dict[str, Tensor]]:
    lift_float32_casts()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    optimizer = Adam(model.parameters(), lr=1e-3, eps=1e-4)
    before = generate_text(model, tokenizer)
    if tp > 1:
        model = parallel(model, {"tp": tp})
        meshtrain.rebind(optimizer)
    after = generate_text(model, tokenizer)
    losses = train(model, optimizer, tokenizer)
    if tp == 1:
        return before, after, losses, generate_text(model, tokenizer), {}
    model.save_parallelized(save_directory=out / "parallel_ckpt")
    return before, after, losses, generate_text(model, tokenizer), full_parameters(model)


def load_again(folder: Path, tp: int) -> tuple[str, dict[str, Tensor]]:
    lift_float32_casts()
    model = parallel(meshtrain.build_model(folder, dtype=torch.float64).eval(), {"tp": tp})
    meshtrain.load_weights(model, folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "huggingface")
    return generate_text(model, tokenizer), full_parameters(model)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=end + 2, n_positions=128, n_embd=32, n_layer=2, n_head=4, bos_token_id=end, eos_token_id=end,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2,
    )  # fmt: skip
    GPT2LMHeadModel(config).double().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tp", [2, 4])
def test_oslo_tutorial_computes_the_same_on_a_mesh(gpt2: Path, tmp_path: Path, tp: int) -> None:
    ((stock_text, _, stock_losses, stock_end, _),) = run_on_ranks(1, run_tutorial, gpt2, tmp_path, 1)
    ranks = run_on_ranks(tp, run_tutorial, gpt2, tmp_path, tp)
    for before, after, losses, end, _ in ranks:
        assert before == after == stock_text
        assert losses == pytest.approx(stock_losses, rel=1e-12, abs=0)
        assert end == stock_end
    trained = ranks[0][-1]
    for other in (2, 1):
        for text, parameters in run_on_ranks(other, load_again, tmp_path / "parallel_ckpt", other):
            assert text == stock_end
            assert all(torch.equal(value, trained[name]) for name, value in parameters.items())
    assert cli._exit_code(["merge", str(tmp_path / "parallel_ckpt"), str(tmp_path / "merged_ckpt")]) == 0
    merged, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged_ckpt", output_loading_info=True)
    assert not any(report.values())
    for name, value in merged.named_parameters():
        assert value.dtype == torch.float64
        assert torch.equal(value, trained[name]), name
