"""Which classes must be proven before they train, and what a proof covers."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, dynamic_module_utils

from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.toml import load_run
from meshtrain.models.build import build_meta_model
from meshtrain.training.resolve import resolve_run
from meshtrain.verify import first_use, record
from meshtrain.verify.case import ProofCase
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
def proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ProofCase]:
    """Return the list of proofs requested so far; no proof is computed."""
    cases: list[ProofCase] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))

    def note(case: ProofCase, directory: Path, switch: str, flags: list[str]) -> None:
        # A started process would run the main program again, and so start further ones.
        assert not hasattr(sys.modules["__main__"], "__file__")
        cases.append(case)

    monkeypatch.setattr(first_use, "_prove", note)
    shipped = record._load()
    flags = {**shipped["gpt2"]["proven"], "scale_attn_weights": [True]}
    known = {"gpt2": {**shipped["gpt2"], "proven": flags}}
    monkeypatch.setattr(record, "_load", lambda: {**shipped, **known})
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    write_text(tmp_path / "text.jsonl")
    return cases


def write_model(directory: Path, *, times: int) -> None:
    """Write a model with a class of its own, whose type is llama."""
    directory.mkdir(exist_ok=True)
    (directory / "modeling_twice.py").write_text(FOREIGN.format(times=times))
    own = {"auto_map": {"AutoModelForCausalLM": "modeling_twice.Twice"}, "architectures": ["Twice"]}
    (directory / "config.json").write_text(json.dumps(CONFIG | own))


def ensure_proven(text: str) -> None:
    Path("run.toml").write_text(RUN_TEXT + text)
    first_use.ensure_proven(resolve_run(load_run("run.toml")))


def test_class_from_the_model_folder_is_proven(tmp_path: Path, proven: list[ProofCase]) -> None:
    text = '[model]\npath = "model"\ntrust_remote_code = true\n'
    write_model(tmp_path / "model", times=2)
    for _ in range(2):
        ensure_proven(text)
        # The tiny copy has the same class; the second time, the proof exists.
        assert [case.architecture for case in proven] == ["Twice"]
    write_model(tmp_path / "model", times=3)
    ensure_proven(text)
    assert [case.architecture for case in proven] == ["Twice", "Twice"]


def test_stock_class_of_a_known_type_needs_no_proof(proven: list[ProofCase]) -> None:
    for more in ("", "trust_remote_code = true\n"):
        ensure_proven(LLAMA_TEXT.replace("[model.config]", f"{more}[model.config]"))
    assert not proven


GPT2_TEXT = """
[model]
type = "gpt2"
attention = "eager"

[model.config]
vocab_size = 300
n_embd = 32
n_layer = 4
n_head = 4
{flags}

[plan.mesh]
tp = {tp}
"""


@pytest.mark.parametrize(
    ("flags", "times"),
    [
        ("", 0),
        ("reorder_and_upcast_attn = true", 0),
        # The record has no variant of GPT-2 with this value.
        ("scale_attn_weights = false", 1),
    ],
)
def test_family_with_uncovered_flags_is_proven_once(
    flags: str, times: int, proven: list[ProofCase], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for _ in range(2):
        ensure_proven(GPT2_TEXT.format(flags=flags, tp=2))
        assert len(proven) == times
    # Without tensor parallelism the rules of the family are not used.
    ensure_proven(GPT2_TEXT.format(flags=flags, tp=1))
    assert len(proven) == times


def test_program_proves_a_family_with_uncovered_flags(
    proven: list[ProofCase], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    plan = ParallelPlan(mesh=MeshPlan(tp=2, dp_shard=1))
    for flags, times in (({}, 0), ({"scale_attn_weights": False}, 1)):
        config = AutoConfig.for_model("gpt2", vocab_size=300, n_embd=32, n_layer=4, n_head=4, **flags)
        first_use.ensure_model_proven(build_meta_model(config, dtype=torch.float32, attention="eager"), plan)
        assert len(proven) == times
