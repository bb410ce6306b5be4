"""A loss of tokens that count differently is that of one process on every mesh."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshtrain
from meshtrain.config.objective import ObjectiveConfig
from meshtrain.config.plan import LossPlan
from meshtrain.config.run import CheckpointConfig, RunConfig
from meshtrain.data.samples.weights import weighted_labels
from meshtrain.errors import ConfigError
from meshtrain.training.step import evaluate, train_step
from meshtrain.training.weighted_loss import build_weighted_loss
from meshtrain.verify.case import OPTIMIZER
from meshtrain.verify.parallel import build_step_context, local_rows
from meshtrain.verify.reference import build_adamw, copy_weights_into
from tests.casts import lift_float32_casts
from tests.parity import GLOBAL_BATCH, Case, _stock_model, batches, build, fill, stock_weights
from tests.ranks import run_on_ranks
from tests.training.runs import Mesh, build_plan, build_run, steps_of, train_here, write_text

MODEL = "llama-untied"
CASES = {
    1: [Case(MODEL, (1, 1, 1, 1))],
    2: [
        *(Case(MODEL, mesh) for mesh in ((1, 1, 2, 1), (1, 2, 1, 1), (1, 1, 1, 2), (2, 1, 1, 1))),
        Case(MODEL, (1, 1, 1, 2), chunk_tokens=5),
    ],
    4: [Case(MODEL, (2, 1, 1, 2))],
}
Traced = list[tuple[float, float]]
"""Loss and gradient norm of each step, and the evaluation loss twice."""


def weights_of(labels: Tensor) -> Tensor:
    """Return float32 weights, of which the first row has none."""
    draw = torch.rand(labels.shape, generator=torch.Generator().manual_seed(3)) * 4
    draw[0] = 0
    return draw


def reference() -> Traced:
    lift_float32_casts()
    model = _stock_model(MODEL)
    copy_weights_into(model, stock_weights(MODEL))
    optimizer, found = build_adamw([*model.parameters()]), []
    for batch in batches():
        optimizer.zero_grad()
        logits, labels = model(batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten()
        weights = weights_of(batch["labels"]).flatten().double() * (labels != -100)
        loss = (F.cross_entropy(logits, labels, reduction="none") * weights).sum() / weights.sum()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_gradient_norm)
        found.append((loss.item(), norm.item()))
        optimizer.step()
    batch = batches()[0]
    with torch.no_grad():
        last = F.cross_entropy(model.eval()(batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten()).item()
    return [*found, (last, last)]


def weighted(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    labels = weighted_labels(batch["labels"].numpy(), weights_of(batch["labels"]).numpy())
    return {**batch, "labels": torch.from_numpy(labels)}


def train_cases(cases: list[Case]) -> list[Traced]:
    lift_float32_casts()
    found = []
    for case in cases:
        pipeline = build(case)
        fill(pipeline, stock_weights(case.model))
        context = replace(build_step_context(pipeline), loss=build_weighted_loss(pipeline))
        traced = []
        for step, batch in enumerate(batches()):
            result = train_step(context, step, local_rows(pipeline, weighted(batch)), np.arange(GLOBAL_BATCH))
            assert result.num_tokens == int((batch["labels"] != -100).sum())
            traced.append((result.loss, result.gradient_norm))
        # Labels of an evaluation have no weights.
        last = evaluate(context, [local_rows(pipeline, batches()[0])]).loss
        found.append([*traced, (last, last)])
    return found


def test_every_mesh_computes_what_one_process_does() -> None:
    (wanted,) = run_on_ranks(1, reference)
    for world_size, cases in CASES.items():
        for answer in run_on_ranks(world_size, train_cases, cases):
            for case, traced in zip(cases, answer, strict=True):
                assert np.array(traced) == pytest.approx(np.array(wanted), rel=1e-12), case


def run_with(directory: Path, weights: list[float] | None, mesh: Mesh = (1, 1, 1, 1), **changes: Any) -> RunConfig:
    """Return a run whose documents have some weights in turn; None: no weights."""
    cp, chunks = changes.pop("cp", 1), changes.pop("chunks", 0)
    plan = build_plan(mesh)
    parts = {"mesh": plan.mesh.model_copy(update={"cp": cp}), "loss": LossPlan(chunk_tokens=chunks)}
    run = build_run(directory, "qwen3", plan.model_copy(update=parts), checkpoint=CheckpointConfig(every=1), **changes)
    path = directory.parent / "weighted.jsonl"
    texts = write_text(directory.parent / "text.jsonl").read_text().splitlines()
    records = [
        {**json.loads(line), "weight": (weights or [1.0])[number % len(weights or [1.0])]}
        for number, line in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {"train": [str(path)], "weight_key": None if weights is None else "weight", "validation": 0.2}
    return run.model_copy(update={"data": run.data.model_copy(update=data)})


def train(run: RunConfig) -> list[list[float]]:
    run_on_ranks(run.plan.mesh.world_size, train_here, run, joins=False)
    return [[it["loss"], it["grad_norm"]] for it in steps_of(Path(run.run_directory))]


def test_run_resumes_on_other_meshes(tmp_path: Path) -> None:
    weights = [0.0, 1.0, 2.5]
    (tmp_path / "a").mkdir()
    wanted = train(run_with(tmp_path / "a" / "run", weights, steps=4))
    places: list[tuple[Mesh, int, int]] = [
        ((1, 1, 2, 1), 1, 0),
        ((1, 1, 1, 1), 2, 13),
        ((2, 1, 1, 1), 1, 0),
        ((1, 1, 1, 2), 1, 13),
    ]
    for steps, (mesh, cp, chunks) in enumerate(places, start=1):
        found = train(run_with(tmp_path / "a" / "other", weights, mesh, cp=cp, chunks=chunks, steps=steps))
    assert np.array(found) == pytest.approx(np.array(wanted), rel=1e-12)


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_equal_weights_change_nothing(form: str, tmp_path: Path) -> None:
    found = []
    for number, weights in enumerate((None, [1.0], [3.0])):
        (tmp_path / str(number)).mkdir()
        found.append(train(run_with(tmp_path / str(number) / "run", weights, steps=2, form=form)))
    for other in found[1:]:
        assert np.array(other) == pytest.approx(np.array(found[0]), rel=1e-12)


def test_other_losses_are_refused(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", [1.0])
    table = run.model_dump() | {"objective": ObjectiveConfig(z_loss=1e-4).model_dump()}
    with pytest.raises(ValueError, match="leave out one of them") as caught:
        RunConfig.model_validate(table)
    assert "`objective` changes the loss, and weights (`weight_key` in `data`) are those of the cross-entropy" in str(
        caught.value
    )
    with pytest.raises(ConfigError) as refused:
        meshtrain.train(run, loss=lambda logits, labels: logits.sum())
    assert refused.value.lines == (
        "train: loss replaces the loss of the run, but its data has weights (weight_key), which it would not get; "
        "leave one of them out",
    )
