"""Which classes must be proven before they train, and what makes a proof one of another thing."""

import json
import sys
from pathlib import Path

import pytest
from transformers import dynamic_module_utils

from meshtrain.config.toml import load_run
from meshtrain.verify import trust
from meshtrain.verify.subject import Subject
from tests.training.runs import LLAMA_TEXT, RUN_TEXT, write_text

FOREIGN = """
from transformers import LlamaForCausalLM


class Twice(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = {times} * output.logits
        return output
"""
CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


@pytest.fixture
def proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Subject]:
    """Return what has been proven so far, in a directory with text; nothing of it is computed."""
    subjects: list[Subject] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))

    def note(subject: Subject, directory: Path, switch: str) -> None:
        # A process that is started now would run the program that asks, and that again.
        assert not hasattr(sys.modules["__main__"], "__file__")
        subjects.append(subject)

    monkeypatch.setattr(trust, "_prove", note)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    write_text(tmp_path / "text.jsonl")
    return subjects


def write_model(directory: Path, *, times: int) -> None:
    """Write a model that brings its own class, and calls itself a llama."""
    directory.mkdir(exist_ok=True)
    (directory / "modeling_twice.py").write_text(FOREIGN.format(times=times))
    own = {"auto_map": {"AutoModelForCausalLM": "modeling_twice.Twice"}, "architectures": ["Twice"]}
    (directory / "config.json").write_text(json.dumps(CONFIG | own))


def ensure_proven(text: str) -> None:
    Path("run.toml").write_text(RUN_TEXT + text)
    trust.ensure_proven(load_run("run.toml"))


def test_a_class_that_comes_with_a_model_of_a_known_type_is_unknown(tmp_path: Path, proven: list[Subject]) -> None:
    text = '[model]\npath = "model"\ntrust_remote_code = true\n'
    write_model(tmp_path / "model", times=2)
    for _ in range(2):
        ensure_proven(text)
        # Of that class is the tiny copy too; the second time its proof is there already.
        assert [subject.architecture for subject in proven] == ["Twice"]
    write_model(tmp_path / "model", times=3)
    ensure_proven(text)
    assert [subject.architecture for subject in proven] == ["Twice", "Twice"]


def test_a_stock_class_of_a_known_type_is_known(proven: list[Subject]) -> None:
    for more in ("", "trust_remote_code = true\n"):
        ensure_proven(LLAMA_TEXT.replace("[model.config]", f"{more}[model.config]"))
    assert not proven
