"""Label smoothing and z-loss are those of torch, on every mesh; evaluations stay as they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshtrain.config.families import with_family
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.objective import STOCK_OBJECTIVE, ObjectiveConfig
from meshtrain.config.plan import ParallelPlan, PrecisionPlan
from meshtrain.config.run import EvaluationConfig, ModelConfig
from meshtrain.config.toml import load_run
from meshtrain.errors import ConfigError
from meshtrain.models.build import load_hf_config
from meshtrain.runtime.ranks import RankError
from meshtrain.training.loss import TokenLoss, count_trained_tokens
from meshtrain.training.objective import RegularizedLoss, build_objective
from meshtrain.verify.case import ProofCase
from meshtrain.verify.parallel import build_step_context
from meshtrain.verify.prove import prove_together
from meshtrain.verify.verify_run import make_case
from tests.parallel.steps import start, take_step
from tests.parity import Case
from tests.ranks import run_on_ranks
from tests.training.runs import build_plan, build_run, read_metrics, steps_of, train_here

BOTH = ObjectiveConfig(label_smoothing=0.1, z_loss=1e-2)
OBJECTIVES = (BOTH, ObjectiveConfig(label_smoothing=0.3), ObjectiveConfig(z_loss=1e-2))
VOCABULARY = 11


def logits_and_labels(dtype: torch.dtype = torch.float64, num_trained: int = 9) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(3, 5, VOCABULARY, generator=stream, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (3, 5), generator=stream)
    labels.view(-1)[:4] = torch.tensor([0, VOCABULARY - 1, 5, 6])
    labels.view(-1)[num_trained:] = -100
    return logits.to(dtype), labels


def of_torch(logits: Tensor, labels: Tensor, objective: ObjectiveConfig) -> Tensor:
    """Return the sum over the trained tokens, as torch computes it."""
    logits, labels = logits.flatten(0, 1), labels.flatten()
    smoothed = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=objective.label_smoothing)
    return smoothed + objective.z_loss * logits[labels != -100].logsumexp(-1).square().sum()


def differentiate(loss: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    before = leaf.detach().clone()
    value = loss(leaf, labels)
    value.backward()
    assert torch.equal(leaf, before), "the logits were changed in place"
    assert leaf.grad is not None
    return value.detach(), leaf.grad


def on_shards() -> list[tuple[Tensor, Tensor, tuple[Tensor, ...]]]:
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for objective in OBJECTIVES:
        logits, labels = logits_and_labels()
        loss = RegularizedLoss(VOCABULARY, dist.group.WORLD, objective.label_smoothing, objective.z_loss)
        mean = loss.mean_over(torch.tensor(7))
        found.append((*differentiate(mean, logits.chunk(size, -1)[rank], labels), mean.terms()))
    return found


def test_sharded_logits_give_what_torch_computes_from_all() -> None:
    ranks = run_on_ranks(3, on_shards)
    for objective, answers in zip(OBJECTIVES, zip(*ranks, strict=True), strict=True):
        logits, labels = logits_and_labels()
        value, gradient = differentiate(lambda *it, o=objective: of_torch(*it, o) / 7, logits, labels)
        assert all(torch.allclose(found, value, rtol=1e-14) for found, _, _ in answers)
        assert torch.allclose(torch.cat([it for _, it, _ in answers], -1), gradient, rtol=0, atol=1e-14)
        cross_entropy, z_loss = (of_torch(logits, labels, STOCK_OBJECTIVE) / 7, _z(logits, labels) / 7)
        for _, _, terms in answers:
            wanted = [cross_entropy, z_loss][: len(terms)]
            assert torch.stack(terms).tolist() == pytest.approx([float(it) for it in wanted], rel=1e-14)
            assert len(terms) == (2 if objective.z_loss else 1)


def _z(logits: Tensor, labels: Tensor) -> Tensor:
    return logits[labels != -100].logsumexp(-1).square().sum()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "num_trained"),
    [(torch.float64, 9), (torch.float64, 1), (torch.float64, 0), (torch.float32, 9), (torch.bfloat16, 9)],
    ids=str,
)
def test_all_logits_give_what_torch_computes(objective: ObjectiveConfig, dtype: torch.dtype, num_trained: int) -> None:
    logits, labels = logits_and_labels(dtype, num_trained)
    loss = RegularizedLoss(VOCABULARY, None, objective.label_smoothing, objective.z_loss).mean_over(torch.tensor(7))
    value, gradient = differentiate(loss, logits, labels)
    wide = logits.to(torch.promote_types(dtype, torch.float32))
    wanted, wanted_gradient = differentiate(lambda *it: of_torch(*it, objective) / 7, wide, labels)
    close = 1e-14 if dtype == torch.float64 else 1e-6
    assert value.dtype == wanted.dtype
    assert torch.allclose(value, wanted, rtol=close, atol=0)
    rtol = 2**-7 if dtype == torch.bfloat16 else 0
    assert torch.allclose(gradient, wanted_gradient.to(dtype), rtol=rtol, atol=close)
    if num_trained == 0:
        assert value.item() == 0.0
        assert not gradient.any()


def test_z_loss_alone_takes_logits_of_minus_infinity() -> None:
    logits, labels = logits_and_labels()
    logits[..., 3] = -torch.inf
    labels[labels == 3] = 4
    loss = RegularizedLoss(VOCABULARY, None, 0.0, 1e-2).mean_over(torch.tensor(1))
    value, gradient = differentiate(loss, logits, labels)
    wanted, _ = differentiate(lambda *it: of_torch(*it, ObjectiveConfig(z_loss=1e-2)), logits, labels)
    assert torch.allclose(value, wanted, rtol=1e-14)
    assert bool(gradient.isfinite().all())


def proof_case(mesh: dict[str, int], objective: ObjectiveConfig = BOTH, **tables: Any) -> ProofCase:
    small, kind = MeshPlan(**{"dp_shard": 1, **mesh}), "qwen3_moe" if "ep" in mesh else "qwen3"
    plan = with_family(ParallelPlan.model_validate({**tables, "mesh": small.model_dump()}), kind)
    return make_case(load_hf_config(ModelConfig(type=kind)), plan, small, objective=objective)


CHUNKS = {"loss": {"chunk_tokens": 13}}
WHOLE_LOGITS = {"tensor": {"loss_parallel": False}}
ZERO_BUBBLE = {"pipeline": {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}}
CASES: dict[int, list[tuple[dict[str, int], ObjectiveConfig, dict[str, Any]]]] = {
    2: [
        ({"dp_shard": 2}, BOTH, {}),
        ({"tp": 2}, BOTH, {}),
        ({"tp": 2}, BOTH, CHUNKS),
        ({"tp": 2}, BOTH, WHOLE_LOGITS),
        ({"pp": 2}, ObjectiveConfig(label_smoothing=0.1), {}),
        ({"cp": 2}, ObjectiveConfig(z_loss=1e-2), CHUNKS),
        ({"ep": 2}, BOTH, {}),
    ],
    4: [
        ({"pp": 2, "tp": 2}, BOTH, {}),
        ({"pp": 2, "tp": 2}, BOTH, ZERO_BUBBLE),
    ],
}


@pytest.mark.parametrize("world_size", CASES)
def test_every_mesh_computes_what_one_process_does(world_size: int) -> None:
    """`meshtrain verify` proves it too, with the objective of the run."""
    cases = [proof_case(mesh, objective, **tables) for mesh, objective, tables in CASES[world_size]]
    for case, proof in zip(cases, prove_together(cases), strict=True):
        assert proof.difference is None, (case.plan.mesh, case.objective, proof.difference)
        kinds = {finding.what for finding in proof.findings}
        assert ("z-loss" in kinds) == (case.objective.z_loss > 0)
        assert {"cross-entropy", "evaluation loss", "gradient", "parameter after 3 steps"} <= kinds


def terms_in_float16(objective: ObjectiveConfig) -> list[tuple[float, dict[str, float]]]:
    found = []
    for compute in ("float32", "float16"):
        pipeline = start(Case("llama-untied", (1, 1, 1, 1), precision=PrecisionPlan(compute=compute)))
        result = take_step(build_step_context(pipeline, objective=objective), 0)
        found.append((result.loss, result.terms))
    return found


def test_the_loss_scale_of_float16_is_in_no_metric() -> None:
    ((loss, terms), (loss_16, terms_16)) = run_on_ranks(1, terms_in_float16, BOTH)[0]
    assert loss_16 == pytest.approx(loss, rel=1e-2)
    assert terms_16 == pytest.approx(terms, rel=1e-2)
    # The loss of a new model: its tokens are all equally likely, also those of smoothed targets.
    assert loss == pytest.approx(terms["cross_entropy"] + BOTH.z_loss * terms["z_loss"], rel=1e-2)


def kinds_of_losses() -> list[str]:
    pipeline = start(Case("llama-untied", (1, 1, 1, 1)))
    losses = build_objective(pipeline), build_objective(pipeline, BOTH)
    return [type(it).__name__ for loss in losses for it in (loss, loss.mean_over(torch.tensor(1)))]


def test_without_an_objective_the_loss_is_the_cross_entropy_alone() -> None:
    (found,) = run_on_ranks(1, kinds_of_losses)
    assert found == ["TokenLoss", "MeanLoss", "RegularizedLoss", "MeanWithTerms"]


def test_run_has_metrics_of_the_terms_and_evaluates_the_cross_entropy(tmp_path: Path) -> None:
    text = {"evaluation": EvaluationConfig(every=1), "steps": 1}
    run = build_run(tmp_path / "run", "qwen3", build_plan((1, 1, 1, 1)), objective=BOTH, **text)
    data = run.data.model_copy(update={"validation": 0.2})
    run = run.model_copy(update={"data": data})
    run_on_ranks(1, train_here, run, joins=False)
    (step,) = steps_of(tmp_path / "run")
    assert step["loss"] > step["cross_entropy"] + BOTH.z_loss * step["z_loss"] - 0.1
    (evaluation,) = [it["eval_loss"] for it in read_metrics(tmp_path / "run") if "eval_loss" in it]
    assert evaluation < step["cross_entropy"]
    # What was learned depends on the objective.
    other = run.model_copy(update={"objective": ObjectiveConfig(label_smoothing=0.2), "steps": 2})
    with pytest.raises(RankError) as caught:
        run_on_ranks(1, train_here, other, joins=False)
    assert "objective.label_smoothing is 0.1 in that file and 0.2 in this run" in str(caught.value.original)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("objective.label_smoothing=1.0", "objective.label_smoothing: expected a number from 0 below 1, found 1.0"),
        ("objective.z_loss=-1e-4", "objective.z_loss: expected a number from 0 to 10, found -0.0001"),
        ("objective.z_losses=1e-4", "objective.z_losses"),
        ("loss.label_smoothing=0.1", "loss"),
    ],
)
def test_mistakes_are_refused(override: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('run_directory = "out"\nsteps = 1\nglobal_batch_size = 8\nmodel.type = "gpt2"\n')
    with pytest.raises(ConfigError) as caught:
        load_run(path, [override])
    assert f"command line: {message}" in caught.value.lines[0]


def test_terms_of_microbatches_add_up() -> None:
    logits, labels = logits_and_labels()
    loss = RegularizedLoss(VOCABULARY, None, 0.1, 1e-2).mean_over(count_trained_tokens(labels))
    total = sum(loss(part, some) for part, some in zip(logits.split(1), labels.split(1), strict=True))
    assert torch.allclose(torch.as_tensor(total), of_torch(logits, labels, BOTH) / 9, rtol=1e-14)
    cross_entropy, z_loss = loss.terms()
    assert float(cross_entropy) == pytest.approx(float(TokenLoss(VOCABULARY, None)(logits, labels)) / 9, rel=1e-14)
    assert float(z_loss) == pytest.approx(float(_z(logits, labels)) / 9, rel=1e-14)
