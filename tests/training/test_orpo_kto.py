"""ORPO and KTO: losses, metrics and parameters of every mesh are those by hand in one process."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from meshtrain.config.data import DataConfig, MixedSourceConfig, SourceConfig
from meshtrain.config.preference import PreferenceConfig
from meshtrain.config.run import EvaluationConfig, RunConfig
from meshtrain.training.preference.formulas import log_odds_ratio
from tests.ranks import run_on_ranks
from tests.training.preferences import (
    SEQUENCE,
    LossOfStep,
    Record,
    answer_of,
    close,
    compare,
    preference_run,
    reward_terms,
    train,
    train_stock,
    write_base,
    write_records,
)
from tests.training.runs import Mesh, build_plan, read_metrics, steps_of

CONFIGS = {
    "orpo": PreferenceConfig(loss="orpo", beta=0.3),
    "kto": PreferenceConfig(loss="kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.75),
}
# pp, dp_replicate, dp_shard, tp; cp
MESHES: list[tuple[Mesh, int]] = [
    ((1, 1, 2, 1), 1),
    ((1, 1, 1, 2), 1),
    ((1, 1, 1, 1), 2),
    ((2, 1, 1, 1), 1),
    ((2, 1, 1, 2), 1),
]


def orpo(
    model: Any, reference: Any, tokenizer: Tokenizer, records: Sequence[Record], ids: Sequence[int]
) -> tuple[Tensor, dict[str, float]]:
    losses, found = [], []
    for record in (records[number] for number in ids):
        answers = [answer_of(model, tokenizer, record["prompt"], record[key]) for key in ("chosen", "rejected")]
        chosen, rejected = (it.log_prob / it.length for it in answers)
        odds = [it.exp() / (1 - it.exp()) for it in (chosen, rejected)]
        ratio = torch.log(odds[0] / odds[1])
        losses.append(-chosen - 0.3 * F.logsigmoid(ratio))
        found.append([0.3 * chosen.item(), 0.3 * rejected.item(), -chosen.item(), ratio.item()])
    chosen, rejected, cross_entropy, ratio = torch.tensor(found, dtype=torch.float64).T
    terms = {
        **reward_terms(chosen, rejected),
        "nll_loss": cross_entropy.mean().item(),
        "log_odds_ratio": ratio.mean().item(),
    }
    return torch.stack(losses).mean(), terms


def kto(
    model: Any, reference: Any, tokenizer: Tokenizer, records: Sequence[Record], ids: Sequence[int]
) -> tuple[Tensor, dict[str, float]]:
    def log_ratio(number: int, of: int) -> Tensor:
        pair = records[number]["prompt"], records[of]["completion"]
        with torch.no_grad():
            before = answer_of(reference, tokenizer, *pair).log_prob
        return answer_of(model, tokenizer, *pair).log_prob - before

    with torch.no_grad():
        distance = torch.stack([log_ratio(it, (it - 1) % len(records)) for it in ids]).mean().clamp(min=0)
    ratios = [log_ratio(it, it) for it in ids]
    labels = [records[it]["label"] for it in ids]
    losses = [
        1.5 * (1 - torch.sigmoid(0.3 * (it - distance)))
        if is_desirable
        else 0.75 * (1 - torch.sigmoid(0.3 * (distance - it)))
        for it, is_desirable in zip(ratios, labels, strict=True)
    ]
    of_label = {
        label: [0.3 * it.item() for it, own in zip(ratios, labels, strict=True) if own == label]
        for label in (True, False)
    }
    terms = {
        "rewards/chosen": np.mean(of_label[True]) if of_label[True] else math.nan,
        "rewards/rejected": np.mean(of_label[False]) if of_label[False] else math.nan,
        "kl": distance.item(),
    }
    return torch.stack(losses).mean(), terms


BY_HAND: dict[str, LossOfStep] = {"orpo": orpo, "kto": kto}


def run_on(directory: Path, loss: str, mesh: Mesh, cp: int, **changes: Any) -> RunConfig:
    plan = build_plan(mesh)
    plan = plan.model_copy(update={"mesh": plan.mesh.model_copy(update={"cp": cp})})
    name = changes.pop("name", f"{'-'.join(map(str, mesh))}-{cp}")
    return preference_run(directory, name, plan, CONFIGS[loss], **changes)


@pytest.mark.parametrize("loss", CONFIGS)
def test_every_mesh_trains_as_the_formula_by_hand_in_one_process(tmp_path: Path, loss: str) -> None:
    """Fillers complete the last batch of the evaluation: 11 samples, in batches of 8."""
    write_base(tmp_path)
    records = write_records(tmp_path / "records.jsonl", loss)
    held_out = write_records(tmp_path / "held-out.jsonl", loss, number=3, seed=1)
    one = run_on(tmp_path, loss, (1, 1, 1, 1), 1, name="one")
    data = one.data.model_copy(update={"validation": [str(tmp_path / "held-out.jsonl")], "pad_to_multiple_of": 4})
    changes = {"data": data, "evaluation": EvaluationConfig(every=3)}
    one = one.model_copy(update=changes)
    (stock,) = run_on_ranks(1, train_stock, one, records, BY_HAND[loss], held_out, joins=False)
    runs = [one, *(run_on(tmp_path, loss, mesh, cp, **changes) for mesh, cp in MESHES)]
    for run in runs:
        if run is not one:
            train(run)
        directory = Path(run.run_directory)
        compare(directory, stock)
        (found,) = (it for it in read_metrics(directory) if "eval_loss" in it)
        for name, value in stock.evaluation.items():
            assert found[name] == close(value), f"{directory.name}: {name}"
    if loss == "kto":
        assert stock.terms[2]["kl"] > 0


@pytest.mark.parametrize("loss", CONFIGS)
def test_runs_resume_on_other_meshes(tmp_path: Path, loss: str) -> None:
    write_base(tmp_path)
    records = write_records(tmp_path / "records.jsonl", loss)
    one = run_on(tmp_path, loss, (1, 1, 1, 1), 1, name="one")
    (stock,) = run_on_ranks(1, train_stock, one, records, BY_HAND[loss], [], joins=False)
    for steps, mesh in ((1, (2, 1, 1, 1)), (3, (1, 1, 2, 1))):
        train(run_on(tmp_path, loss, mesh, 1, name="resumed", steps=steps))
    compare(tmp_path / "resumed", stock)


def test_mismatched_answers_train_beside_a_process_without_first_and_last_stage(tmp_path: Path) -> None:
    """In a V the second process has the two stages in the middle, which read no tokens."""
    write_base(tmp_path)
    records = write_records(tmp_path / "records.jsonl", "kto")
    one = run_on(tmp_path, "kto", (1, 1, 1, 1), 1, name="one")
    (stock,) = run_on_ranks(1, train_stock, one, records, kto, [], joins=False)
    plan = build_plan((2, 1, 1, 1), schedule="ZBVZeroBubble")
    run = preference_run(tmp_path, "v", plan, CONFIGS["kto"])
    assert run.self_checks
    train(run)
    compare(tmp_path / "v", stock)
    # A single answer is one row; that beside it is not trained on.
    assert [it["tokens"] for it in steps_of(tmp_path / "v")] == [8 * SEQUENCE * it for it in (1, 2, 3)]


def test_odds_of_answers_that_are_almost_sure_or_impossible() -> None:
    small = torch.tensor([[-1e-14, -60.0], [-0.7, -0.69]], dtype=torch.float64, requires_grad=True)
    found = log_odds_ratio(small)
    wanted = [-math.log(1e-14) + 60.0, -0.7 - math.log(-math.expm1(-0.7)) + 0.69 + math.log(-math.expm1(-0.69))]
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), small)
    assert gradient.isfinite().all()


def test_rewards_over_sources_are_means_over_their_answers(tmp_path: Path) -> None:
    """One source has no undesirable answers to evaluate."""
    write_base(tmp_path)
    write_records(tmp_path / "records.jsonl", "kto", number=8)
    write_records(tmp_path / "others.jsonl", "kto", number=8, seed=1)
    judged = write_records(tmp_path / "judged.jsonl", "kto", number=12, seed=2)
    held_out = {"good": [it for it in judged if it["label"]][:2], "mixed": judged}
    number = sum(it["label"] for it in judged)
    assert 2 < number < 12
    found = {}
    for evaluated in (("good",), ("mixed",), ("good", "mixed")):
        sources = {}
        for name, train_file in (("good", "records.jsonl"), ("mixed", "others.jsonl")):
            path = tmp_path / f"{name}-held-out.jsonl"
            path.write_text("".join(json.dumps(it) + "\n" for it in held_out[name]))
            validation = [str(path)] if name in evaluated else []
            files = [str(tmp_path / train_file)]
            sources[name] = MixedSourceConfig(train=files, validation=validation, format="unpaired_preference")
        run = run_on(tmp_path, "kto", (1, 1, 1, 1), 1, name="-".join(evaluated), steps=1)
        data = DataConfig(**{**run.data.model_dump(exclude=set(SourceConfig.model_fields)), "sources": sources})
        train(run.model_copy(update={"data": data}))
        found[evaluated] = next(it for it in read_metrics(Path(run.run_directory)) if "eval_loss" in it)
    good, mixed, both = found.values()
    assert good["eval_rewards/rejected"] is None
    assert both["eval_rewards/rejected"] == close(mixed["eval_rewards/rejected"])
    wanted = (2 * good["eval_rewards/chosen"] + number * mixed["eval_rewards/chosen"]) / (2 + number)
    assert both["eval_rewards/chosen"] == close(wanted)
    assert both["eval_loss"] == close((2 * good["eval_loss"] + 12 * mixed["eval_loss"]) / 14)
