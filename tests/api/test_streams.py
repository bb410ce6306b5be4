"""Dropout and the generators of a program, sparse labels, and scripts under torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import meshtrain
from tests.api.folders import byte_tokenizer
from tests.api.programs import own_part, padded_batches, parallel, stock_model
from tests.ranks import run_on_ranks

DROPPED = GPT2Config(
    vocab_size=98, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2, resid_pdrop=0.3,
    embd_pdrop=0.3, attn_pdrop=0.3,
)  # fmt: skip


def drop() -> tuple[list[float], float]:
    """Train with dropout while each rank draws numbers; return losses and a gradient norm."""
    torch.manual_seed(0)
    model = parallel(GPT2LMHeadModel(DROPPED).train(), {"tp": 2}, tensor={"sequence_parallel": True})
    torch.manual_seed(torch.distributed.get_rank())
    losses = []
    for _ in range(3):
        torch.rand(1 + torch.distributed.get_rank())
        before = torch.get_rng_state()
        loss = model(**padded_batches()[0]).loss
        assert torch.equal(torch.get_rng_state(), before)
        loss.backward()
        losses.append(loss.item())
    return losses, model.transformer.ln_f.weight.grad.norm().item()


def test_dropout_does_not_depend_on_numbers_that_the_program_draws() -> None:
    (losses, norm), other = run_on_ranks(2, drop)
    assert (losses, norm) == other
    # The masks differ from step to step.
    assert len({*losses}) == 3


def count_few() -> tuple[float, float]:
    """Train with one data rank that has no label that counts."""
    batch = padded_batches()[0]
    batch["labels"][4:] = -100
    stock, model = stock_model("llama-untied"), parallel(stock_model("llama-untied"), {"dp_replicate": 2})
    want, found = stock(**batch).loss, model(**own_part(model, batch)).loss
    want.backward()
    found.backward()
    gradients = dict(stock.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=0, atol=1e-14)
    return want.item(), found.item()


def test_data_rank_without_labels_adds_nothing() -> None:
    for want, found in run_on_ranks(2, count_few):
        assert found == pytest.approx(want, rel=1e-12)


def test_readme_program_runs(tmp_path: Path) -> None:
    """Run it under torchrun; it has no process group, no guard, and builds its optimizer first."""
    root = Path(meshtrain.__file__).parents[1]
    program = re.findall(r"```python\n(import meshtrain.*?)```", (root / "README.md").read_text(), flags=re.DOTALL)[0]
    assert len(program.splitlines()) <= 15
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "gpt2")
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=64)
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "lines.txt").write_text("one line\nand another line\nand a third\n")
    (tmp_path / "program.py").write_text(program.replace('"tp": 4', '"tp": 2'))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tuned = GPT2LMHeadModel.from_pretrained(tmp_path / "tuned")
    start = GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2")
    assert not torch.equal(tuned.transformer.wte.weight, start.transformer.wte.weight)
    assert (tmp_path / "tuned" / "tokenizer.json").exists()
