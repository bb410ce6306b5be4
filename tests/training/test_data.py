"""Training data end to end: mixtures, separate documents, widths, conversations and streams.

Each run stops after two steps, resumes on another mesh, and is compared with an undisturbed one.
"""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from meshtrain.config.data import IGNORE_INDEX, DataConfig, MixedSourceConfig, TokenizerConfig
from meshtrain.config.plan import AttentionPlan, CompilePlan, RecomputePlan
from meshtrain.config.run import CheckpointConfig, ModelConfig, RunConfig
from meshtrain.data.cache import Cache
from meshtrain.data.prepare import prepare_data
from meshtrain.data.samples.dataset import build_dataset
from meshtrain.data.samples.rows import Samples
from meshtrain.errors import ConfigError, DataError, ModelError
from meshtrain.planning.remarks import documents_remark
from meshtrain.training.report import plan_table
from meshtrain.training.resolve import resolve_run
from meshtrain.training.run import train_run
from meshtrain.verify.first_use import ensure_proven
from tests.data.corpora import byte_tokenizer
from tests.parity import LLAMA, LONGROPE
from tests.ranks import run_on_ranks
from tests.training.runs import build_plan, build_run, read_metrics, samples_seen, steps_of, train_here, write_text

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
MESHES = ((2, 1, 1, 2), (1, 1, 2, 1), (4, 1, 1, 1))


def tokenizer_of(directory: Path) -> TokenizerConfig:
    """Return a byte-level tokenizer with a chat template."""
    files = byte_tokenizer(Cache(directory / "cache"))
    if not (directory / "tokenizer").exists():
        shutil.copytree(files.directory, directory / "tokenizer")
        (directory / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    return TokenizerConfig(path=str(directory / "tokenizer"))


def write_talk(path: Path) -> str:
    records = [
        {"messages": [{"role": "user", "content": "a" * (1 + n % 7)}, {"role": "assistant", "content": f"say {n}"}]}
        for n in range(60)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def data_of(directory: Path, name: str) -> DataConfig:
    """Return the data settings of a run."""
    texts = [str(write_text(directory / f"{number}.jsonl", documents=40, seed=number)) for number in range(2)]
    common: dict[str, Any] = {
        "sequence_length": 32,
        "tokenizer": tokenizer_of(directory),
        "cache_directory": str(directory / "cache"),
    }
    sources = {
        "one": MixedSourceConfig(train=texts[:1], weight=3.0),
        "two": MixedSourceConfig(train=texts[1:], repeat=False, validation=0.2),
    }
    kinds: dict[str, dict[str, Any]] = {
        "mixture": {"sources": sources, "documents": "separate"},
        "uneven": {"sources": sources, "form": "padded", "pad_to_multiple_of": 4, "group_by_length": 2},
        "chat": {"train": [write_talk(directory / "talk.jsonl")], "format": "chat", "form": "padded"},
        "stream": {"train": texts, "streaming": True, "shuffle_buffer": 12, "documents": "separate"},
        "streams": {
            "sources": {
                "streamed": MixedSourceConfig(train=texts[:1], streaming=True),
                "talk": MixedSourceConfig(train=[write_talk(directory / "talk.jsonl")], format="chat"),
            },
            "shuffle_buffer": 5,
        },
    }
    return DataConfig(**{**common, **kinds[name]})


def run_of(directory: Path, name: str, out: str, mesh: tuple[int, int, int, int], **changes: Any) -> RunConfig:
    changes = {"steps": 6, "checkpoint": CheckpointConfig(every=2), **changes}
    run = build_run(directory / out, "gpt2", build_plan(mesh), **changes)
    return run.model_copy(update={"data": data_of(directory, name)})


def train_on_ranks(config: RunConfig) -> dict[int, Any]:
    mesh = config.plan.mesh
    ranks = mesh.pp * mesh.dp_replicate * mesh.dp_shard * mesh.tp
    return samples_seen(run_on_ranks(ranks, train_here, config, joins=False))


@pytest.mark.parametrize("name", ["mixture", "uneven", "chat", "stream", "streams"])
def test_run_resumes_on_other_meshes_with_the_same_samples(tmp_path: Path, name: str) -> None:
    expected = train_on_ranks(run_of(tmp_path, name, "whole", (1, 1, 1, 1)))
    seen: dict[int, Any] = {}
    for steps, mesh in zip((2, 4, 6), MESHES, strict=True):
        seen |= train_on_ranks(run_of(tmp_path, name, "traveling", mesh, steps=steps))

    assert seen == expected
    pairs = list(zip(steps_of(tmp_path / "whole"), steps_of(tmp_path / "traveling"), strict=True))
    assert [found["step"] for _, found in pairs] == list(range(1, 7))
    for metric in ("loss", "grad_norm"):
        assert max(abs(found[metric] - wanted[metric]) / wanted[metric] for wanted, found in pairs) <= 1e-12
    for wanted, found in pairs:
        counts = {metric: value for metric, value in wanted.items() if metric.startswith("samples/")}
        assert {metric: found[metric] for metric in counts} == counts
        assert sum(counts.values()) in (0, 8 * wanted["step"])
        assert ("tokens" in wanted) == (name != "uneven")


@pytest.mark.parametrize("name", ["chat", "stream"])
def test_run_with_skipped_bad_records_resumes(tmp_path: Path, name: str) -> None:
    config = run_of(tmp_path, name, "out", (1, 1, 1, 1), steps=2)
    train_on_ranks(config)
    skipping = {"data": config.data.model_copy(update={"on_bad_record": "skip"}), "steps": 4}
    assert list(train_on_ranks(config.model_copy(update=skipping))) == [2, 3]


def open_token_files(config: RunConfig) -> list[str]:
    """Train, and return the token files that are mapped at the end."""
    train_run(config)
    maps = Path(f"/proc/{os.getpid()}/maps").read_text().splitlines()
    return sorted({Path(line.split()[-1]).name for line in maps if line.endswith((".bin", ".idx"))})


@pytest.mark.parametrize(("documents", "between"), [("joined", []), ("separate", ["documents.bin"])])
def test_ranks_between_embedding_and_head_open_no_token_file(
    tmp_path: Path, documents: str, between: list[str]
) -> None:
    config = run_of(tmp_path, "mixture", "out", (4, 1, 1, 1), steps=2)
    source = config.data.sources["one"]
    data = DataConfig(
        train=source.train,
        documents=documents,
        sequence_length=32,
        tokenizer=config.data.tokenizer,
        cache_directory=config.data.cache_directory,
    )

    first, second, third, last = run_on_ranks(
        4, open_token_files, config.model_copy(update={"data": data}), joins=False
    )

    assert first == last == sorted({"tokens.bin", *between})
    assert second == third == between


def test_epochs_and_steps_that_the_data_lacks_are_refused_before_training(tmp_path: Path) -> None:
    mixture = run_of(tmp_path, "mixture", "out", (1, 1, 1, 1))
    with pytest.raises(
        ConfigError, match="`epochs` = 2, but a mixture has no epochs, because each source has its own; set `steps`"
    ):
        train_run(mixture.model_copy(update={"epochs": 2, "steps": None}))
    ending = {name: source.model_copy(update={"repeat": False}) for name, source in mixture.data.sources.items()}
    all_end = mixture.model_copy(update={"data": mixture.data.model_copy(update={"sources": ending}), "steps": 10_000})
    with pytest.raises(DataError, match=r"data.sources: all sources end after \d+ steps, but the run has 10,000; set"):
        train_run(all_end)

    streamed = run_of(tmp_path, "stream", "out", (1, 1, 1, 1))
    with pytest.raises(
        ConfigError, match=r"`epochs` = 2, but data.streaming: the end of a stream is not known in advance"
    ):
        train_run(streamed.model_copy(update={"epochs": 2, "steps": None}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"form": "padded", "group_by_length": 2}, "`group_by_length` has no effect without `pad_to_multiple_of`"),
        (
            {"drop_last": False, "sources": {"one": {"train": ["a"]}, "two": {"train": ["b"]}}},
            "`drop_last` = false fills up the last batch of an",
        ),
        (
            {"drop_last": False, "sources": {"one": {"train": ["a"], "repeat": False}}},
            "`drop_last` = false fills up the last batch",
        ),
        ({"sources": {"one": {}}}, "sources.one.train\n  Field required"),
        ({"format": "completion", "prompt_key": "completion"}, "`prompt_key` and `completion_key` are both"),
        ({"sources": {"one": {"train": ["a"], "weight": math.inf}}}, "Input should be a finite number"),
    ],
    ids=str,
)
def test_data_settings_without_effect_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        DataConfig(**changes)


def test_separate_documents_of_a_class_without_positions_are_refused(tmp_path: Path) -> None:
    config = run_of(tmp_path, "mixture", "out", (1, 1, 1, 1))
    bloom = config.model.model_copy(update={"type": "bloom", "config": {"vocab_size": 300}, "attention": "eager"})
    with pytest.raises(ModelError, match="BloomForCausalLM does not accept position_ids, which keep documents apart"):
        resolve_run(config.model_copy(update={"model": bloom}), 1)


def test_separate_documents_with_length_dependent_frequencies_are_refused(tmp_path: Path) -> None:
    config = run_of(tmp_path, "mixture", "out", (1, 1, 1, 1))
    tables = {"rope_parameters": LONGROPE, "max_position_embeddings": 40}
    model = config.model.model_copy(update={"type": "llama", "config": {**LLAMA, "vocab_size": 300, **tables}})
    config = config.model_copy(update={"model": model})
    with pytest.raises(ModelError) as refused:
        resolve_run(config, 1)
    assert str(refused.value) == (
        'data.documents = "separate", but documents of more than 10 tokens change the rotary frequencies of this '
        "LlamaForCausalLM for all others in their batch (rope_type in its rope_parameters); set data.sequence_length = "
        '10 or less, or data.documents = "joined"'
    )
    for data in ({"documents": "joined"}, {"sequence_length": 10}):
        assert resolve_run(config.model_copy(update={"data": config.data.model_copy(update=data)}), 1)


def test_separate_documents_of_a_class_are_proven_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = run_of(tmp_path, "mixture", "out", (1, 1, 1, 1))
    ensure_proven(resolve_run(config))
    assert "proving its documents apart on a tiny copy of it" in capsys.readouterr().out
    ensure_proven(resolve_run(config))
    assert capsys.readouterr().out == ""


def test_loss_of_each_source_is_in_the_metrics(tmp_path: Path) -> None:
    """Each loss is that of a run with this source alone; their mean is over all tokens."""
    config = run_of(tmp_path, "mixture", "both", (1, 1, 1, 1), steps=1)
    held_out = {name: source.model_copy(update={"validation": 0.3}) for name, source in config.data.sources.items()}
    both = config.data.model_copy(update={"sources": held_out})
    train_on_ranks(config.model_copy(update={"data": both}))
    (found,) = (line for line in read_metrics(tmp_path / "both") if "eval_loss" in line)

    data = prepare_data(both)
    counts = [
        count_tokens(samples) for samples, _ in build_dataset(data, global_batch_size=8, seed=0).validation.values()
    ]
    losses = [found["eval_loss/one"], found["eval_loss/two"]]
    assert losses[0] != losses[1]
    assert found["eval_loss"] == pytest.approx(np.average(losses, weights=counts), rel=1e-12)


def count_tokens(samples: Samples) -> int:
    return int((samples.read(np.arange(len(samples)))["labels"] != IGNORE_INDEX).sum())


def test_class_that_does_not_separate_documents_is_refused(tmp_path: Path) -> None:
    config = run_of(tmp_path, "mixture", "out", (1, 1, 1, 1))
    opt = {"vocab_size": 300, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = ModelConfig(type="opt", config={**opt, "word_embed_proj_dim": 32})
    # Attention keeps them apart if it computes each one alone.
    plan = config.plan.model_copy(update={"attention": AttentionPlan(documents="mask")})
    with pytest.raises(ModelError, match=r'set data.documents = "joined" if it does not keep documents apart, or set'):
        ensure_proven(resolve_run(config.model_copy(update={"model": model, "plan": plan})))


def test_plan_shows_how_documents_are_kept_apart(tmp_path: Path) -> None:
    config = run_of(tmp_path, "mixture", "out", (1, 1, 1, 1))
    alone = resolve_run(config)
    assert ("attention", "per document") in plan_table(alone).rows
    assert documents_remark(alone).startswith("Each sequence is assumed to be one document")
    plan = config.plan.model_copy(update={"attention": AttentionPlan(documents="mask")})
    rows = plan_table(resolve_run(config.model_copy(update={"plan": plan}))).rows
    assert ("attention", "dense mask of documents (attention.documents = 'mask')") in rows
    plan = config.plan.model_copy(
        update={"compile": CompilePlan(enabled=True), "recompute": RecomputePlan(mode="selective")}
    )
    rows = plan_table(resolve_run(config.model_copy(update={"plan": plan}))).rows
    assert dict(rows)["attention"].startswith("dense mask of documents (with compile.enabled, the parts of a layer")
    data = config.data.model_copy(update={"documents": "joined"})
    joined = resolve_run(config.model_copy(update={"data": data}))
    assert "attention" not in dict(plan_table(joined).rows)
    assert documents_remark(joined) == ""
