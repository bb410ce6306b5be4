"""The example programs run as their readers run them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from meshtrain import cli
from tests.api.folders import byte_tokenizer, write_llama

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "launch" / "examples"


def run(example: str, processes: int, *arguments: str, cwd: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
         str(EXAMPLES / example), *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    text = [f"{'a line of text ' * (1 + number % 4)}with the number {number}" for number in range(420)]
    (tmp_path / "lines.txt").write_text("\n".join(text))
    return tmp_path / "lines.txt"


def losses_of(output: str) -> list[tuple[int, float]]:
    return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+) loss (\d+\.\d{6})", output)]


def test_examples_are_short() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert [file.name for file in files] == ["lora_chat.py", "pipeline.py", "tensor_parallel.py"]
    assert all(len(file.read_text().splitlines()) <= 60 for file in files)


def test_tensor_parallel_example(tmp_path: Path, lines: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "gpt2")
    end = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=end + 1, n_positions=128, n_embd=32, n_layer=2, n_head=4, bos_token_id=end, eos_token_id=end,
        initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    output = run("tensor_parallel.py", 2, "gpt2", "lines.txt", "out", cwd=tmp_path)
    assert "The same text as before: True" in output
    assert "Loaded again, it writes the same: True" in output
    assert [step for step, _ in losses_of(output)] == [50, 100]
    merge = re.search(r"meshtrain (merge \S+ \S+)", output)
    assert merge is not None
    assert cli._exit_code([merge[1].split()[0], *(str(tmp_path / path) for path in merge[1].split()[1:])]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged").config.n_layer == 2


def test_pipeline_example_resumes(tmp_path: Path, lines: Path) -> None:
    write_llama(tmp_path / "llama")
    output = run("pipeline.py", 4, "llama", "lines.txt", "out", cwd=tmp_path)
    found = losses_of(output)
    assert [step for step, _ in found] == [10, 20]
    assert found[1][1] < found[0][1]
    whole = (tmp_path / "out" / "model" / "model.safetensors").read_bytes()
    # Repeat the same steps without its last checkpoint, on another mesh.
    for lost in ("checkpoints/step-20", "model"):
        subprocess.run(["rm", "-r", str(tmp_path / "out" / lost)], check=True)
    again = losses_of(run("pipeline.py", 2, "llama", "lines.txt", "out", cwd=tmp_path))
    assert again == [(20, pytest.approx(found[1][1], abs=2e-6))]
    assert len((tmp_path / "out" / "model" / "model.safetensors").read_bytes()) == len(whole)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model", output_loading_info=True)
    assert not any(report.values())
    assert model.config.num_hidden_layers == 4


def test_lora_example(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama")
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"say {number}"},
                {"role": "assistant", "content": f"{number} it is"},
            ]
        }
        for number in range(40)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    found = losses_of(run("lora_chat.py", 4, "llama", "chats.jsonl", "out", cwd=tmp_path))
    assert found[-1][1] < found[0][1]
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    adapted = PeftModel.from_pretrained(base, tmp_path / "out" / "adapters").merge_and_unload()
    merged = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged").named_parameters())
    for name, parameter in adapted.named_parameters():
        torch.testing.assert_close(parameter, merged[name], rtol=0, atol=1e-6)
