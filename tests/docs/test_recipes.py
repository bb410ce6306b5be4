"""Each recipe of the docs runs from its first file to its last command, with a tiny model."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from meshtrain.data.cache import Cache
from meshtrain.data.tokens.tokenizer_training import train_tokenizer
from tests.data.corpora import open_corpus
from tests.docs.blocks import ROOT, commands, page_blocks
from tests.training.runs import WORDS

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }}{{ eos_token }}{% endgeneration %}{% else %}{{ message['content'] }} {% endif %}"
    "{% endfor %}"
)
# Added to the commands of a recipe, so that they take seconds.
SMALL = [
    "global_batch_size=8",
    "micro_batch_size=2",
    "data.sequence_length=32",
    "optimizer.learning_rate=1e-2",
    "learning_rate.warmup_steps=1",
    "plan.precision.compute=float32",
    "checkpoint.every=4",
]
SMALL_MODEL = ["model.config.vocab_size=300", *(f"model.config.{key}={value}" for key, value in TINY.items())]
SHORT = ["steps=8", "evaluation.every=4", "generate.every=4", "generate.max_new_tokens=4"]
OVERRIDES = {
    "pretrain": [*SMALL, *SMALL_MODEL, *SHORT],
    "fine-tune": [*SMALL, "epochs=1", "data.pad_to_multiple_of=16", "plan.precision.parameters=float32"],
    "continue": [*SMALL, *SHORT],
}
DRAW = np.random.default_rng(0)


def words(number: int) -> str:
    return " ".join(DRAW.choice(WORDS, number))


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_documents(path: Path, number: int = 80, begin: str = "") -> None:
    write_lines(path, [{"text": begin + words(int(DRAW.integers(20, 60)))} for _ in range(number)])


def write_base(folder: Path) -> None:
    """Write a pretrained model with its tokenizer, as on the hub."""
    write_documents(folder / "text.jsonl")
    cache = Cache(folder / "cache")
    tokenizer = train_tokenizer([open_corpus(folder / "text.jsonl", cache=cache)], 300, cache)
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **TINY)).save_pretrained(folder / "models/base")
    tokenizer.copy(folder / "models/base")
    (folder / "models/base/chat_template.jinja").write_text(TEMPLATE)


def prepare_pretrain(folder: Path) -> None:
    write_documents(folder / "texts/documents.jsonl", 150)


def prepare_fine_tune(folder: Path) -> None:
    write_base(folder)
    answer = {"role": "assistant", "content": "token comes after text"}
    chats = [[{"role": "user", "content": words(3)}, answer] for _ in range(64)]
    write_lines(folder / "chats.jsonl", [{"messages": chat} for chat in chats])
    choices = ["token comes after text", "others read which rows"]
    write_lines(
        folder / "tasks/questions.jsonl",
        [{"question": f"user: {words(3)} assistant:", "choices": choices, "answer": 0} for _ in range(6)],
    )


def prepare_continue(folder: Path) -> None:
    write_base(folder)
    write_documents(folder / "law/one.jsonl", begin="<|law|>")
    write_documents(folder / "general/one.jsonl")


def run_page(name: str, folder: Path) -> None:
    """Write the files of a recipe, and run its commands in order."""
    page = ROOT / f"docs/recipes/{name}.md"
    for text_before, block in page_blocks(page):
        named = re.findall(r"`([\w./-]+)`", text_before)
        if block.language in ("toml", "yaml"):
            path = folder / named[-1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
            continue
        for words_of_command in commands(block):
            run(words_of_command, OVERRIDES[name], folder)


def run(words_of_command: list[str], overrides: list[str], folder: Path) -> None:
    program, command, *rest = words_of_command
    assert program == "meshtrain"
    if rest and rest[0].endswith(".toml") and rest[0] != "corpus.toml":
        rest = [rest[0], *overrides, *rest[1:]]
    rest = ["300" if word == "32000" else "2" if word == "8" else word for word in rest]
    if command == "generate":
        rest += ["--max-new-tokens", "4"]
    line = [sys.executable, "-m", "meshtrain", command, *rest]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": str(folder / "datasets")}
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(words_of_command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def check_pretrain(folder: Path) -> None:
    assert len(AutoTokenizer.from_pretrained(folder / "my-model")) == 300
    LlamaForCausalLM.from_pretrained(folder / "my-model")


def check_fine_tune(folder: Path) -> None:
    scores = [json.loads((folder / name).read_text()) for name in ("before.json", "after.json")]
    before, after = (score["questions"]["acc"] for score in scores)
    assert after == 1.0 >= before
    assert (folder / "adapters/adapter_model.safetensors").is_file()


def check_continue(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "my-law-model")
    assert tokenizer.convert_tokens_to_ids("<|law|>") == 300
    assert LlamaForCausalLM.from_pretrained(folder / "my-law-model").config.vocab_size == 301


RECIPES: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "pretrain": (prepare_pretrain, check_pretrain),
    "fine-tune": (prepare_fine_tune, check_fine_tune),
    "continue": (prepare_continue, check_continue),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name: str, tmp_path: Path) -> None:
    prepare, check = RECIPES[name]
    prepare(tmp_path)
    run_page(name, tmp_path)
    check(tmp_path)


def test_every_recipe_is_tested() -> None:
    assert {page.stem for page in (ROOT / "docs/recipes").glob("*.md")} == {*RECIPES}
