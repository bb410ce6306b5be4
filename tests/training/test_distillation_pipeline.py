"""Distillation over pp, cp and ep: every mesh trains as two stock models in one process."""

from pathlib import Path
from typing import Any

from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ContextPlan, ParallelPlan
from meshtrain.config.run import EvaluationConfig, RunConfig
from meshtrain.training.distillation import teacher as teacher_module
from tests.ranks import run_on_ranks
from tests.training.experts import experts_plan, train_eagerly, write_experts
from tests.training.preferences import close, compare, train, write_base
from tests.training.runs import build_plan, read_metrics, train_here, write_text
from tests.training.teachers import run_on, stock_of, write_models, write_teacher

SCHEDULES = ("GPipe", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def test_pipelines_train_as_two_stock_models_in_one_process(tmp_path: Path) -> None:
    """The teacher has other numbers of layers on the stages than the model."""
    write_base(tmp_path)
    write_teacher(tmp_path, n_layer=5)
    stock = stock_of(tmp_path)
    for mesh in ((2, 1, 1, 1), (2, 1, 2, 1)):
        train(run_on(tmp_path, mesh))
        compare(tmp_path / "-".join(map(str, mesh)), stock)
    train(run_on(tmp_path, (2, 1, 1, 2), sequence_parallel=True))
    compare(tmp_path / "2-1-1-2", stock)
    train(run_on(tmp_path, (2, 1, 1, 1), name="interleaved", schedule="Interleaved1F1B"))
    compare(tmp_path / "interleaved", stock)


def test_every_schedule_trains_as_two_stock_models_in_one_process(tmp_path: Path) -> None:
    write_models(tmp_path)
    stock = stock_of(tmp_path)
    for schedule in SCHEDULES:
        train(run_on(tmp_path, (2, 1, 1, 1), name=schedule, schedule=schedule))
        compare(tmp_path / schedule, stock)
    for mesh in ((2, 2, 1, 1), (4, 1, 1, 1), (2, 1, 1, 2)):
        train(run_on(tmp_path, mesh))
        compare(tmp_path / "-".join(map(str, mesh)), stock)
    for schedule in ("Interleaved1F1B", "ZBVZeroBubble"):
        train(run_on(tmp_path, (2, 1, 2, 1), name=f"{schedule}-fsdp", schedule=schedule))
        compare(tmp_path / f"{schedule}-fsdp", stock)


def test_padded_rows_and_a_resumption_on_other_pipelines(tmp_path: Path) -> None:
    write_models(tmp_path)
    write_text(tmp_path / "text.jsonl", documents=40)
    stock = stock_of(tmp_path, form="padded")
    for steps, mesh, schedule in (
        (1, (2, 1, 1, 1), "1F1B"),
        (2, (1, 1, 2, 1), "1F1B"),
        (3, (2, 1, 1, 1), "ZBVZeroBubble"),
    ):
        train(run_on(tmp_path, mesh, name="resumed", steps=steps, form="padded", schedule=schedule))
    compare(tmp_path / "resumed", stock)


def test_separate_documents_over_a_pipeline_and_evaluations(tmp_path: Path) -> None:
    write_models(tmp_path)
    write_text(tmp_path / "held-out.jsonl", documents=12, seed=2)
    held_out = {"validation": [str(tmp_path / "held-out.jsonl")]}
    data = run_on(tmp_path, (1, 1, 1, 1)).data
    apart = data.model_copy(update={"documents": "separate", "sequence_length": 32, **held_out})
    changes: dict[str, Any] = {"data": apart, "evaluation": EvaluationConfig(every=3)}
    stock = stock_of(tmp_path, **changes)
    train(run_on(tmp_path, (2, 1, 1, 1), **changes))
    compare(tmp_path / "2-1-1-1", stock)
    found, wanted = (
        [it["eval_loss"] for it in read_metrics(tmp_path / name) if "eval_loss" in it] for name in ("2-1-1-1", "one")
    )
    assert found == [close(value) for value in wanted]
    assert wanted


def plan_of(mesh: MeshPlan, **changes: Any) -> ParallelPlan:
    return build_plan((1, 1, 1, 1)).model_copy(update={"mesh": mesh, **changes})


def test_parts_of_sequences_are_compared_with_the_same_ones(tmp_path: Path) -> None:
    """cp divides the heads of the model, and not those of the teacher."""
    write_base(tmp_path)
    write_teacher(tmp_path, n_head=1)
    stock = stock_of(tmp_path)
    one, two = MeshPlan(cp=2, dp_shard=1), MeshPlan(pp=2, cp=2, dp_shard=1)
    gathered = {"context": ContextPlan(method="all_gather", order="head_tail")}
    for name, mesh, changes in (("heads", one, {}), ("keys", two, gathered)):
        train(run_on(tmp_path, (1, 1, 1, 1), name=name, plan=plan_of(mesh, **changes)))
        compare(tmp_path / name, stock)


def test_experts_of_both_models_are_divided(tmp_path: Path) -> None:
    write_base(tmp_path)
    write_experts(tmp_path / "base")
    write_experts(tmp_path / "teacher", layers=3, experts=2)
    stock = stock_of(tmp_path, train_eagerly)
    for name, plan in (("ep", experts_plan(ep=2)), ("pp x ep", experts_plan(pp=2, ep=2))):
        run = run_on(tmp_path, (1, 1, 1, 1), name=name, plan=plan)
        run_on_ranks(run.plan.mesh.world_size, train_eagerly, run, joins=False)
        compare(tmp_path / name, stock)


def train_with_kept_logits(run: RunConfig) -> None:
    """Train with a teacher of a class whose head cannot run later."""
    teacher_module.find_base_apart = lambda plan, model: None
    train_here(run)


def test_logits_are_kept_where_the_head_cannot_run_later(tmp_path: Path) -> None:
    write_models(tmp_path)
    stock = stock_of(tmp_path)
    run = run_on(tmp_path, (2, 1, 1, 2))
    run_on_ranks(run.plan.mesh.world_size, train_with_kept_logits, run, joins=False)
    compare(Path(run.run_directory), stock)
