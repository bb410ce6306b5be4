"""Tasks and generated texts during training, on the mesh of the run."""

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from meshtrain import load_run
from meshtrain.api.train import train
from meshtrain.config.evaluation import GenerateConfig, TasksConfig
from meshtrain.config.run import ModelConfig, RunConfig
from meshtrain.errors import ConfigError, UserError
from meshtrain.inference.prompts import Decoding, generate_texts
from meshtrain.profiling.report.recorded import read_run_directory
from meshtrain.runtime.ranks import RankError
from tests.casts import lift_float32_casts
from tests.inference.test_evaluation import scores_on_mesh, write_tasks
from tests.parity import DYNAMIC, LLAMA
from tests.ranks import run_on_ranks
from tests.training.runs import (
    LLAMA_TEXT,
    RUN_TEXT,
    SEQUENCE,
    VOCABULARY,
    build_plan,
    build_run,
    read_metrics,
    steps_of,
    write_text,
)


def train_on_mesh(run: RunConfig) -> None:
    lift_float32_casts()
    train(run)


def test_training_goes_on_as_without_generating(tmp_path: Path) -> None:
    plain = build_run(tmp_path / "plain", "gpt2-dropout", build_plan((1, 1, 2, 1)), steps=4)
    run_on_ranks(2, train_on_mesh, plain, joins=False)
    samples = GenerateConfig(prompts=["model reads"], every=3, max_new_tokens=4, temperature=1.0)
    update = {"run_directory": str(tmp_path / "run"), "generate": samples}
    run_on_ranks(2, train_on_mesh, plain.model_copy(update=update), joins=False)
    losses = [[step["loss"] for step in steps_of(tmp_path / name)] for name in ("run", "plain")]
    assert losses[0] == losses[1]
    found = {line["step"]: line["generated"] for line in read_metrics(tmp_path / "run") if "generated" in line}
    assert sorted(found) == [3, 4]
    assert [sample["prompt"] for sample in found[4]] == ["model reads"]
    assert len(found[4][0]["text"]) > len("model reads")
    assert read_run_directory(tmp_path / "run").steps[-1]["step"] == 4
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    shown = [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors("generated/1")]
    assert shown == [(step, f"    {found[step][0]['text']}\n") for step in (3, 4)]


def test_long_texts_leave_dynamic_frequencies_as_they_were(tmp_path: Path) -> None:
    values = {**LLAMA, "vocab_size": VOCABULARY, "max_position_embeddings": SEQUENCE, "rope_parameters": DYNAMIC}
    plain = build_run(tmp_path / "plain", "qwen3", build_plan((1, 1, 1, 1)), steps=3)
    plain = plain.model_copy(update={"model": ModelConfig(type="llama", config=values)})
    texts = GenerateConfig(prompts=["model reads text"], every=1, max_new_tokens=2 * SEQUENCE)
    writing = plain.model_copy(update={"run_directory": str(tmp_path / "run"), "generate": texts})
    for run in (plain, writing):
        run_on_ranks(1, train_on_mesh, run, joins=False)
    losses = [[step["loss"] for step in steps_of(tmp_path / name)] for name in ("run", "plain")]
    assert losses[0] == losses[1]


def test_text_that_is_too_long_for_the_model_is_refused_before_the_start(tmp_path: Path) -> None:
    texts = GenerateConfig(prompts=["model reads"], max_new_tokens=32)
    run = build_run(tmp_path / "run", "gpt2", build_plan((1, 1, 1, 1)), steps=1, generate=texts)
    with pytest.raises(RankError) as caught:
        run_on_ranks(1, train_on_mesh, run, joins=False)
    assert isinstance(caught.value.original, UserError)
    assert "32 more is asked for, but the model has 32 positions; ask for at most" in str(caught.value.original)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_greedy_samples_and_scores_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    tasks = write_tasks(tmp_path / "tasks")
    run = build_run(tmp_path / "run", "qwen3", build_plan((2, 1, 1, 1)), steps=3).model_copy(
        update={
            "tasks": TasksConfig(names=["choice", "rolling"], folder=str(tasks.folder), every=2, batch_size=2),
            "generate": GenerateConfig(prompts=["model reads", "text"], max_new_tokens=5),
        }
    )
    run_on_ranks(2, train_on_mesh, run, joins=False)
    metrics = read_metrics(tmp_path / "run")
    (samples,) = (line["generated"] for line in metrics if "generated" in line)
    before, scores = (line for line in metrics if "tasks/choice/acc" in line)
    assert (before["step"], scores["step"]) == (2, 3)
    texts = generate_texts(str(tmp_path / "run"), ["model reads", "text"], Decoding(5, temperature=0.0))
    assert [sample["text"] for sample in samples] == texts
    out = tmp_path / "scores.json"
    run_on_ranks(1, scores_on_mesh, str(tmp_path / "run"), tasks, build_plan((1, 1, 1, 1)), out, joins=False)
    wanted = json.loads(out.read_text())["rolling"]["bits_per_byte"]
    assert scores["tasks/rolling/bits_per_byte"] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["tasks.every=5"], "tasks: `every`: nothing reads this without `names`; set `names`, or leave it out"),
        (
            ["generate.every=5"],
            "generate: `every`: nothing reads this without `prompts`; set `prompts`, or leave it out",
        ),
        (['generate.prompts=[""]'], "generate.prompts"),
    ],
)
def test_contradictory_settings_are_refused(keys: list[str], message: str, tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl")
    (tmp_path / "run.toml").write_text(RUN_TEXT + LLAMA_TEXT)
    with pytest.raises(ConfigError) as caught:
        load_run(str(tmp_path / "run.toml"), keys)
    assert message in str(caught.value)
