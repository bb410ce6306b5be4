"""Scores of downstream tasks on a mesh are those that the harness finds for the exported model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshtrain.checkpoint.huggingface.export import export_checkpoint
from meshtrain.config.plan import ParallelPlan
from meshtrain.errors import ConfigError
from meshtrain.inference import evaluation
from meshtrain.inference.evaluation import Tasks, evaluate_tasks
from tests.ranks import run_on_ranks
from tests.training.runs import WORDS, Mesh, build_plan, build_run, train_here

pytest.importorskip("lm_eval")
NAMES = ("choice", "rolling", "continued", "longer")
COMMON = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {documents}}}}}
test_split: test
"""
OF_TASK = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "continued": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
generation_kwargs: {max_gen_toks: 4, until: ["."]}
metric_list: [{metric: !function scores.letters, aggregation: mean, higher_is_better: true}]
""",
    "longer": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
generation_kwargs: {max_gen_toks: 6, until: ["."]}
metric_list: [{metric: !function scores.letters, aggregation: mean, higher_is_better: true}]
""",
}


def write_tasks(folder: Path) -> Tasks:
    """Write tasks that need no network, with an odd number of documents."""
    folder.mkdir()
    draw = np.random.default_rng(0)

    def words(number: int) -> str:
        return " ".join(draw.choice(WORDS, number))

    documents = folder / "documents.jsonl"
    rows = [
        {"question": words(3), "choices": [words(2) for _ in range(3)], "answer": 1, "text": words(9)} for _ in range(7)
    ]
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in OF_TASK.items():
        (folder / f"{name}.yaml").write_text(COMMON.format(name=name, documents=documents) + text)
    # Ranks that took every second request would have different numbers of batches.
    longer = folder / "longer.yaml"
    longer.write_text(longer.read_text().replace(str(documents), str(folder / "fewer.jsonl")))
    (folder / "fewer.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:1]))
    (folder / "scores.py").write_text("def letters(references, predictions): return sum(map(ord, predictions[0]))")
    return Tasks(NAMES, folder, batch_size=2)


def stock_scores(folder: str, tasks: Tasks) -> dict[str, Any]:
    """Return what the harness finds for a Hugging Face folder by itself."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    model = HFLM(folder, dtype="float64", device="cpu", batch_size=2)
    return simple_evaluate(model, tasks=list(tasks.names), task_manager=tasks.manager())["results"]


def scores_on_mesh(source: str, tasks: Tasks, plan: ParallelPlan, out: Path) -> bool:
    """Evaluate, and return whether the random stream stayed as it was."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    evaluate_tasks(source, tasks, plan, out)
    return torch.equal(before, torch.get_rng_state())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run_on_ranks(1, train_here, build_run(folder / "run", "qwen3", build_plan((1, 1, 1, 1)), steps=2), joins=False)
    export_checkpoint(folder / "run", folder / "exported", dtype="original")
    return folder


def test_scores_equal_those_of_the_export(trained: Path, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks")
    (wanted,) = run_on_ranks(1, stock_scores, str(trained / "exported"), tasks, joins=False)
    meshes: list[Mesh] = [(1, 1, 2, 1), (1, 2, 1, 1), (1, 1, 1, 2), (2, 1, 1, 1)]
    for number, mesh in enumerate(meshes):
        out = tmp_path / f"{number}.json"
        plan = build_plan(mesh)
        kept = run_on_ranks(2, scores_on_mesh, str(trained / "run"), tasks, plan, out, joins=False)
        assert kept == [True, True]
        found = json.loads(out.read_text())
        for task, metrics in found.items():
            for name, value in metrics.items():
                assert value == pytest.approx(wanted[task][f"{name},none"], rel=1e-6), (mesh, task, name)
        assert {*found["choice"]} >= {"acc", "acc_norm"}
        assert found["rolling"]["word_perplexity"] > 1
        assert 1 < found["continued"]["letters"] < found["longer"]["letters"]


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        Tasks(("choice",)).check()
    assert caught.value.lines == ("tasks need lm_eval, which is not installed; pip install meshtrain[evaluate]",)


def test_processes_without_a_plan_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = write_tasks(tmp_path / "tasks")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes are started, but there is no plan for them; add mesh"):
        evaluate_tasks("nowhere", tasks)


def test_unknown_task_and_folder_are_refused(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks")
    with pytest.raises(ConfigError) as caught:
        Tasks(("choise",), tasks.folder).check()
    assert caught.value.lines == ("there is no task 'choise'; did you mean 'choice'?",)
    with pytest.raises(ConfigError, match="the folder of tasks, is not a directory; pass one with YAML files"):
        Tasks(NAMES, tmp_path / "none").check()
