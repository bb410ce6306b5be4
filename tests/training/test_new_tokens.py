"""Chat data with new special tokens for a pretrained model, from the run file alone."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from meshtrain.checkpoint.huggingface.export import export_checkpoint
from meshtrain.config.data import DataConfig, TokenizerConfig
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.run import CheckpointConfig, ModelConfig, RunConfig
from meshtrain.data.cache import Cache
from meshtrain.data.tokens.tokenizer_training import train_tokenizer
from meshtrain.errors import ModelError
from meshtrain.runtime.ranks import RankError
from tests.data.corpora import open_corpus
from tests.ranks import run_on_ranks
from tests.training.runs import QWEN3, VOCABULARY, build_plan, build_run, steps_of, train_here, write_text

TOKENS = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>"
    "{% endif %}\n{% endfor %}"
)


def write_model(directory: Path) -> PreTrainedModel:
    """Write a pretrained model and its tokenizer into one directory, like on the hub."""
    corpus = open_corpus(write_text(directory / "text.jsonl"), cache=Cache(directory / "cache"))
    tokenizer = train_tokenizer([corpus], VOCABULARY, Cache(directory / "cache"))
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **QWEN3))
    model.save_pretrained(directory / "base")
    tokenizer.copy(directory / "base")
    (directory / "base/chat_template.jinja").write_text(TEMPLATE)
    return model


def run_of(directory: Path, plan: ParallelPlan, *, steps: int = 2, path: str = "base") -> RunConfig:
    talk = directory / "talk.jsonl"
    messages = [[{"role": "user", "content": "a" * (n % 7)}, {"role": "assistant", "content": "b"}] for n in range(40)]
    talk.write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))
    data = DataConfig(
        train=[str(talk)],
        format="chat",
        form="padded",
        sequence_length=32,
        tokenizer=TokenizerConfig(path=str(directory / "base"), special_tokens=TOKENS),
        cache_directory=str(directory / "cache"),
    )
    model = ModelConfig(path=str(directory / path), weights="pretrained", enlarge_vocabulary=True)
    run = build_run(directory / "run", "qwen3", plan, steps=steps, checkpoint=CheckpointConfig(every=2))
    return run.model_copy(update={"data": data, "model": model})


def test_new_tokens_are_trained_resumed_and_exported(tmp_path: Path) -> None:
    base = write_model(tmp_path)
    run_on_ranks(2, train_here, run_of(tmp_path, build_plan((1, 1, 1, 2))), joins=False)
    run_on_ranks(2, train_here, run_of(tmp_path, build_plan((2, 1, 1, 1)), steps=4), joins=False)
    assert [metrics["step"] for metrics in steps_of(tmp_path / "run")] == [1, 2, 3, 4]
    export_checkpoint(tmp_path / "run", tmp_path / "exported")

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer.convert_tokens_to_ids(TOKENS) == [VOCABULARY, VOCABULARY + 1]
    assert tokenizer.encode("<|im_start|>", add_special_tokens=False) == [VOCABULARY]
    assert tokenizer.decode([VOCABULARY + 1], skip_special_tokens=True) == ""
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False).startswith("<|im_start|>")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float64)
    assert model.config.vocab_size == VOCABULARY + 2
    rows, known = model.get_input_embeddings().weight, base.get_input_embeddings().weight.double()
    assert rows.shape[0] == VOCABULARY + 2
    # Trained for four steps of 1e-2 from their initial values.
    assert (rows[:VOCABULARY] - known).abs().max() < 0.05
    assert (rows[VOCABULARY:] - known.mean(0)).abs().max() < 0.05
    assert not torch.equal(rows[VOCABULARY], rows[VOCABULARY + 1])


def test_enlarging_the_vocabulary_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    run_on_ranks(1, train_here, run_of(tmp_path, build_plan((1, 1, 1, 1))), joins=False)
    again = run_of(tmp_path, build_plan((1, 1, 1, 1)), path="run/checkpoints/step-2")
    with pytest.raises((RankError, ModelError), match=r"is a checkpoint; export it, and set model\.path"):
        run_on_ranks(1, train_here, again.model_copy(update={"run_directory": str(tmp_path / "other")}), joins=False)
