"""DPO: pairs on every mesh as in one process by hand; the reference is kept; resumption."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

import meshtrain
from meshtrain.config.lora import LoraConfig
from meshtrain.config.preference import PreferenceConfig
from meshtrain.config.run import EvaluationConfig, RunConfig
from meshtrain.config.toml import load_run
from meshtrain.data.prepare import prepare_data
from meshtrain.errors import ConfigError, DataError, UserError
from meshtrain.training.resolve import resolve_run
from tests.ranks import run_on_ranks
from tests.training.experts import experts_plan, train_eagerly, write_experts
from tests.training.preferences import (
    SEQUENCE,
    Record,
    Stock,
    answer_of,
    close,
    compare,
    preference_run,
    refused,
    reward_terms,
    train,
    train_stock,
    write_base,
    write_records,
)
from tests.training.runs import Mesh, build_plan, read_metrics, steps_of

DPO = PreferenceConfig(loss="dpo", beta=0.3, label_smoothing=0.1)
# pp, dp_replicate, dp_shard, tp; cp
MESHES: list[tuple[Mesh, int]] = [
    ((1, 1, 2, 1), 1),
    ((1, 2, 1, 1), 1),
    ((1, 1, 1, 2), 1),
    ((1, 1, 1, 1), 2),
    ((2, 1, 1, 1), 1),
    ((2, 1, 1, 2), 1),
]


def by_hand(
    model: Any, reference: Any, tokenizer: Tokenizer, records: Sequence[Record], ids: Sequence[int]
) -> tuple[Tensor, dict[str, float]]:
    """Return the mean loss of pairs and their rewards."""
    losses, rewards = [], []
    for record in (records[number] for number in ids):
        answers = [(record["prompt"], record[key]) for key in ("chosen", "rejected")]
        now = [answer_of(model, tokenizer, *it).log_prob for it in answers]
        with torch.no_grad():
            before = [answer_of(reference, tokenizer, *it).log_prob for it in answers]
        logit = 0.3 * ((now[0] - now[1]) - (before[0] - before[1]))
        losses.append(-0.9 * F.logsigmoid(logit) - 0.1 * F.logsigmoid(-logit))
        rewards.append([0.3 * (a - b).item() for a, b in zip(now, before, strict=True)])
    chosen, rejected = torch.tensor(rewards, dtype=torch.float64).T
    return torch.stack(losses).mean(), reward_terms(chosen, rejected)


def run_on(directory: Path, mesh: Mesh, cp: int, **changes: Any) -> RunConfig:
    plan = build_plan(mesh)
    plan = plan.model_copy(update={"mesh": plan.mesh.model_copy(update={"cp": cp})})
    name = changes.pop("name", f"{'-'.join(map(str, mesh))}-{cp}")
    return preference_run(directory, name, plan, DPO, **changes)


def stock_of(directory: Path, records: list[Record], held_out: list[Record], **changes: Any) -> Stock:
    run = run_on(directory, (1, 1, 1, 1), 1, name="one", **changes)
    (stock,) = run_on_ranks(1, train_stock, run, records, by_hand, held_out, joins=False)
    compare(directory / "one", stock)
    return stock


def test_every_mesh_trains_as_the_formula_by_hand_in_one_process(tmp_path: Path) -> None:
    write_base(tmp_path)
    records = write_records(tmp_path / "records.jsonl", "dpo")
    stock = stock_of(tmp_path, records, [])
    assert stock.losses[2] != close(stock.losses[0])
    for mesh, cp in MESHES:
        run = run_on(tmp_path, mesh, cp)
        train(run)
        compare(Path(run.run_directory), stock)


def test_experts_of_the_reference_too_are_divided(tmp_path: Path) -> None:
    write_base(tmp_path)
    write_experts(tmp_path / "base")
    records = write_records(tmp_path / "records.jsonl", "dpo")
    one = run_on(tmp_path, (1, 1, 1, 1), 1, name="one")
    (stock,) = run_on_ranks(1, train_stock, one, records, by_hand, [], train_eagerly, joins=False)
    for name, plan in (("ep", experts_plan(ep=2)), ("pp x ep", experts_plan(pp=2, ep=2))):
        run = run_on(tmp_path, (1, 1, 1, 1), 1, name=name).model_copy(update={"plan": plan})
        run_on_ranks(run.plan.mesh.world_size, train_eagerly, run, joins=False)
    for name in ("one", "ep", "pp x ep"):
        compare(tmp_path / name, stock)


def test_validation_pairs_have_a_loss_and_rewards(tmp_path: Path) -> None:
    """Fillers complete the last batch: 11 pairs, in batches of 8."""
    write_base(tmp_path)
    records = write_records(tmp_path / "records.jsonl", "dpo")
    held_out = write_records(tmp_path / "held-out.jsonl", "dpo", number=11, seed=1)
    run = run_on(tmp_path, (1, 1, 1, 1), 1)
    data = run.data.model_copy(update={"validation": [str(tmp_path / "held-out.jsonl")], "pad_to_multiple_of": 4})
    changes = {"data": data, "evaluation": EvaluationConfig(every=3)}
    stock = stock_of(tmp_path, records, held_out, **changes)
    for mesh in ((1, 1, 2, 1), (2, 1, 1, 1)):
        run = run_on(tmp_path, mesh, 1, **changes)
        train(run)
        (found,) = (it for it in read_metrics(Path(run.run_directory)) if "eval_loss" in it)
        assert {name: found[name] for name in stock.evaluation} == {
            name: close(value) for name, value in stock.evaluation.items()
        }


def test_adapters_are_compared_with_their_base(tmp_path: Path) -> None:
    write_base(tmp_path)
    records = write_records(tmp_path / "records.jsonl", "dpo")
    lora = LoraConfig(rank=4)
    stock = stock_of(tmp_path, records, [], lora=lora)
    for mesh in ((1, 1, 2, 1), (2, 1, 1, 2)):
        run = run_on(tmp_path, mesh, 1, lora=lora)
        train(run)
        compare(Path(run.run_directory), stock)


def test_reference_is_kept_for_a_resumption_on_other_meshes(tmp_path: Path) -> None:
    """The second start reads it; the third computes it again from the weights of the beginning."""
    write_base(tmp_path)
    records = write_records(tmp_path / "records.jsonl", "dpo")
    stock = stock_of(tmp_path, records, [])
    (kept,) = (tmp_path / "cache/references").glob("*/log_probabilities.npz")
    written = kept.stat().st_mtime_ns
    for steps, mesh in ((1, (1, 1, 2, 1)), (2, (2, 1, 1, 1)), (3, (1, 1, 1, 2))):
        if steps == 3:
            shutil.rmtree(kept.parent)
        train(run_on(tmp_path, mesh, 1, name="resumed", steps=steps))
        assert (kept.stat().st_mtime_ns == written) == (steps < 3)
    compare(tmp_path / "resumed", stock)
    # Both rows of each of 8 pairs.
    assert [it["tokens"] for it in steps_of(tmp_path / "resumed")] == [8 * 2 * SEQUENCE * it for it in (1, 2, 3)]


def test_run_without_a_reference_does_not_go_on_with_one(tmp_path: Path) -> None:
    write_base(tmp_path)
    write_records(tmp_path / "records.jsonl", "dpo")
    without = {"preference": PreferenceConfig(loss="orpo")}
    train(run_on(tmp_path, (1, 1, 1, 1), 1, name="run", steps=1).model_copy(update=without))
    # Changed by hand, as the error of the first attempt advises.
    (tmp_path / "run/run.toml").unlink()
    assert refused(run_on(tmp_path, (1, 1, 2, 1), 1, name="run", steps=2)).endswith(
        'step-1: it was saved without a reference, which preference.loss = "dpo" needs; go on with the loss of that '
        "run, or begin a new run from its weights in a directory of its own"
    )


def test_reference_of_other_weights_is_refused(tmp_path: Path) -> None:
    write_base(tmp_path)
    write_records(tmp_path / "records.jsonl", "dpo")
    train(run_on(tmp_path, (1, 1, 1, 1), 1, name="run", steps=1))
    shutil.rmtree(tmp_path / "cache/references")
    write_base(tmp_path, seed=1)
    found = refused(run_on(tmp_path, (1, 1, 1, 1), 1, name="run", steps=2))
    assert "the weights or the configuration in" in found
    assert found.endswith("are others than those at the start; put back the model that was there then")


def test_reference_is_that_of_the_configuration_and_of_an_intact_file(tmp_path: Path) -> None:
    write_base(tmp_path)
    write_records(tmp_path / "records.jsonl", "dpo")
    references = tmp_path / "cache/references"
    train(run_on(tmp_path, (1, 1, 1, 1), 1, name="run", steps=1))
    (kept,) = references.glob("*/log_probabilities.npz")
    kept.write_bytes(kept.read_bytes()[:100])
    train(run_on(tmp_path, (1, 1, 1, 1), 1, name="again", steps=1))
    assert kept.stat().st_size > 100
    config = tmp_path / "base/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 0.5}))
    train(run_on(tmp_path, (1, 1, 1, 1), 1, name="other", steps=1))
    assert len(list(references.glob("*/log_probabilities.npz"))) == 2
    for name in ("run", "again", "other"):
        # At the start the model is its own reference.
        first = next(row for row in read_metrics(tmp_path / name) if "loss" in row)
        assert first["loss"] == pytest.approx(math.log(2))


RUN = """
run_directory = "out"
steps = 1
global_batch_size = 2
model = { path = "base", weights = "pretrained" }
preference.loss = "dpo"

[data]
train = ["records.jsonl"]
form = "padded"
format = "preference"
tokenizer = { path = "base" }
sequence_length = 32
"""
REFUSED = [
    (['data.format = "text"'], '`preference.loss` = "dpo" needs `data.format` = "preference", found "text"'),
    (['data.form = "packed"'], '`preference.loss` = "dpo" compares whole answers, and `data.form` is "packed"'),
    (["data.streaming = true"], '`preference.loss` = "dpo" needs all records at the start, and `data.streaming`'),
    (["objective.z_loss = 0.1"], '`preference.loss` = "dpo" replaces the cross-entropy that `objective` changes'),
    (["logging.noise_scale_every = 10"], '`preference.loss` = "dpo" is a mean over answers, and `logging.noise'),
    (['data.weight_key = "quality"'], "`weight_key` is for texts, chats and completions, and not for answers"),
    (
        ["batch_ramp = { first = 3, increment = 1, steps = 2 }", "micro_batch_size = 2", "global_batch_size = 4"],
        "batch_ramp has a batch of 3 pairs, which is not a multiple of dp 1 x micro_batch_size 2 = 2",
    ),
    (["preference.desirable_weight = 2.0"], '`desirable_weight` is for `loss` = "kto", found "dpo"'),
    (
        ["plan.loss.chunk_tokens = 64"],
        "loss.chunk_tokens = 64 computes the loss in chunks of tokens, and that of preference.loss or ",
    ),
    (["global_batch_size = 3", "micro_batch_size = 2"], "global_batch_size = 3 is not a multiple of dp 1 x micro_b"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[changes[0] for changes, _ in REFUSED])
def test_what_pairs_exclude_is_refused(tmp_path: Path, changes: list[str], message: str) -> None:
    write_base(tmp_path)
    write_records(tmp_path / "records.jsonl", "dpo", number=2)
    (tmp_path / "run.toml").write_text(RUN)
    with pytest.raises(UserError) as caught:
        resolve_run(load_run(tmp_path / "run.toml", changes), 1)
    assert [message in line for line in caught.value.lines] == [True], caught.value.lines


def test_records_without_their_loss_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN.replace('preference.loss = "dpo"', ""))
    with pytest.raises(ConfigError, match=r'`data.format` = "preference" is for `preference.loss`, which is not set'):
        load_run(tmp_path / "run.toml")
    (tmp_path / "run.toml").write_text(RUN.replace('preference.loss = "dpo"', "preference.beta = 0.2"))
    with pytest.raises(ConfigError, match=r"`beta` is set, but `preference.loss` is not"):
        load_run(tmp_path / "run.toml")


def test_tokens_are_refused_where_records_are_needed(tmp_path: Path) -> None:
    write_base(tmp_path)
    write_records(tmp_path / "records.jsonl", "dpo", number=2)
    run = run_on(tmp_path, (1, 1, 1, 1), 1)
    prepare_data(run.data)
    (tokens,) = (tmp_path / "cache/tokens").glob("*/train")
    with pytest.raises(DataError, match=r'is tokenized already, and data.format = "preference" is for records'):
        prepare_data(run.data.model_copy(update={"train": [str(tokens)]}))


def test_loss_of_a_program_is_refused_beside_it(tmp_path: Path) -> None:
    run = run_on(tmp_path, (1, 1, 1, 1), 1)
    with pytest.raises(ConfigError, match=r"train: loss replaces the loss of the run, but its table \[preference\]"):
        meshtrain.train(run, loss=lambda logits, labels: logits.sum())
