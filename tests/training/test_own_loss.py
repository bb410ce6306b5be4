"""A loss of the program's own is minimized on every mesh, if it is a sum over tokens."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import meshtrain
from meshtrain.config.objective import ObjectiveConfig
from meshtrain.config.plan import LossPlan
from meshtrain.config.run import RunConfig
from meshtrain.errors import ConfigError
from meshtrain.training.own_loss import OwnLoss, check_own_loss
from tests.api.programs import own_part, padded_batches, stock_model
from tests.casts import lift_float32_casts
from tests.ranks import run_on_ranks
from tests.training.runs import Mesh, build_plan, build_run, read_checkpoint, steps_of, train_here

SUM = "return the sum over the tokens whose label is not -100; it is divided by their number"
SMOOTHING = ObjectiveConfig(label_smoothing=0.2)
# pp, dp_replicate, dp_shard, tp; cp; tokens of a chunk
MESHES: list[tuple[Mesh, int, int]] = [
    ((1, 1, 2, 1), 1, 0),
    ((1, 1, 1, 2), 1, 0),
    ((1, 1, 1, 2), 1, 13),
    ((1, 1, 1, 1), 2, 13),
    ((2, 1, 1, 2), 1, 0),
]


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """Return what the setting of a run computes too."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.2)


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the focal loss (arXiv:1708.02002)."""
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return ((1 - (-each).exp()).square() * each).sum()


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def differentiated(loss: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    value = loss(leaf, labels)
    value.backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


def logits_and_labels() -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 11, (2, 4), generator=stream)
    labels[0, :2] = -100
    return torch.randn(2, 4, 11, generator=stream, dtype=torch.float64), labels


def on_shards() -> tuple[Tensor, Tensor]:
    logits, labels = logits_and_labels()
    loss = OwnLoss(11, dist.group.WORLD, focal).mean_over(torch.tensor(6))
    return differentiated(loss, logits.chunk(dist.get_world_size(), -1)[dist.get_rank()], labels)


def test_sharded_logits_are_gathered_and_their_gradients_split() -> None:
    """The vocabulary of 11 tokens is not divided evenly."""
    value, gradient = differentiated(lambda *it: focal(*it) / 6, *logits_and_labels())
    answers = run_on_ranks(2, on_shards)
    assert all(torch.equal(found, value) for found, _ in answers)
    torch.testing.assert_close(torch.cat([it for _, it in answers], -1), gradient, rtol=0, atol=1e-15)


def train(runs: list[RunConfig]) -> None:
    lift_float32_casts()
    for run in runs:
        meshtrain.train(run, loss=smoothed)


def test_every_mesh_minimizes_the_loss_of_the_program(tmp_path: Path) -> None:
    """The setting that computes the same is proven elsewhere."""
    one = build_run(tmp_path / "one", "qwen3", build_plan((1, 1, 1, 1)), steps=2, objective=SMOOTHING)
    run_on_ranks(1, train_here, one, joins=False)
    wanted, weights = steps_of(tmp_path / "one"), read_checkpoint(tmp_path / "one")
    by_size: dict[int, list[RunConfig]] = {}
    for number, (mesh, cp, chunk) in enumerate(MESHES):
        plan = build_plan(mesh)
        update = {"loss": LossPlan(chunk_tokens=chunk), "mesh": plan.mesh.model_copy(update={"cp": cp})}
        run = build_run(tmp_path / str(number), "qwen3", plan.model_copy(update=update), steps=2)
        by_size.setdefault(run.plan.mesh.world_size, []).append(run)
    for size, runs in by_size.items():
        run_on_ranks(size, train, runs, joins=False)
        for run in runs:
            found = steps_of(Path(run.run_directory))
            assert [it["loss"] for it in found] == pytest.approx([it["loss"] for it in wanted], rel=1e-12), run.plan
            assert all("cross_entropy" not in it for it in found)
            there = read_checkpoint(Path(run.run_directory))
            for key in (key for key in weights if key.startswith("model.")):
                torch.testing.assert_close(there[key], weights[key], rtol=0, atol=1e-12)


def parallelized(mesh: dict[str, int], loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    return meshtrain.parallelize(stock_model("llama-untied"), {"mesh": mesh}, prove_unknown_class=False, loss=loss)


def over_a_pipeline() -> list[float]:
    batch = padded_batches()[0]
    model = parallelized({"pp": 2}, focal)
    part = own_part(model, batch)
    return [float(model.evaluate(part)), float(model.forward_backward(part))]


def over_the_stock_model() -> float:
    batch = padded_batches()[0]
    labels = batch.pop("labels")
    shifted = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    logits = stock_model("llama-untied")(**batch).logits
    return float(focal(logits.detach(), shifted) / (shifted != -100).sum())


def test_program_minimizes_its_loss_over_a_pipeline() -> None:
    # In a process of its own, in which nothing casts to float32.
    (wanted,) = run_on_ranks(1, over_the_stock_model)
    for found in run_on_ranks(2, over_a_pipeline):
        assert found == pytest.approx([wanted, wanted], rel=1e-12)


def refused_by_parallelize() -> dict[str, str]:
    found = {}
    for name, mesh, loss in (("without", {"dp_shard": 2}, focal), ("mean", {"pp": 2}, mean)):
        with pytest.raises(ConfigError) as caught:
            parallelized(mesh, loss)
        found[name] = str(caught.value)
    return found


def test_parallelize_refuses_a_mean_and_a_loss_without_a_pipeline() -> None:
    (found, _) = run_on_ranks(2, refused_by_parallelize)
    assert found["without"] == (
        "parallelize: loss is for a pipeline, but mesh.pp = 1, with which the model returns logits; compute it from "
        "model(**batch).logits, and leave the argument out"
    )
    assert found["mean"].startswith("parallelize: loss is ")
    assert found["mean"].endswith(f"so it would depend on the mesh; {SUM}")


def joins_neighbors(logits: Tensor, labels: Tensor) -> Tensor:
    return focal(logits, labels) + (logits[:, 1:] - logits[:, :-1]).square().sum()


def counts_ignored(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.square().sum()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (3, "loss is 3; pass a function of logits and labels"),
        (mean, f"in total for each of them alone, so it would depend on the mesh; {SUM}"),
        (joins_neighbors, f"in total for each of them alone, so it would depend on the mesh; {SUM}"),
        (counts_ignored, f"for a token with the label -100; {SUM}"),
        (lambda *it: smoothed(*it).item(), f"for logits (2, 3, 11); {SUM}"),
        (
            lambda *it: smoothed(*it).detach(),
            "a tensor of the shape () without a gradient for logits (2, 3, 11)",
        ),
        (lambda logits, labels: logits.sum(-1), f"a tensor of the shape (2, 3) for logits (2, 3, 11); {SUM}"),
    ],
    ids=["number", "mean", "neighbors", "ignored", "float", "detached", "shape"],
)
def test_loss_that_is_no_sum_over_tokens_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_own_loss("loss", loss, 11)
    (line,) = caught.value.lines
    assert message in line


@pytest.mark.parametrize("loss", [smoothed, focal])
def test_sums_over_tokens_are_accepted(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    check_own_loss("loss", loss, 11)


def test_mistakes_are_refused_before_the_processes_join(tmp_path: Path) -> None:
    run = build_run(tmp_path / "run", "qwen3", build_plan((1, 1, 1, 1)), steps=1)
    with pytest.raises(ConfigError, match=r"^train: loss is .* so it would depend on the mesh; return the sum over"):
        meshtrain.train(run, loss=mean)
    both = partial(meshtrain.train, run.model_copy(update={"objective": SMOOTHING}), loss=smoothed)
    with pytest.raises(ConfigError, match=r"^train: loss replaces the loss of the run, but its table \[objective\]"):
        both()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
