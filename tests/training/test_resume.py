"""Stop and resume: bit-equal on the same mesh, and equal up to float64 rounding on any other."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from meshtrain.checkpoint.storage.directory import CHECKPOINTS_NAME
from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.config.plan import ParallelPlan, PrecisionPlan, ShardPlan
from meshtrain.config.run import CheckpointConfig, EvaluationConfig, RunConfig
from meshtrain.config.toml import dump_toml, load_run
from meshtrain.errors import UserError
from meshtrain.training.directory import changed_length, check_directory, write_resolved
from meshtrain.training.run import train_run
from tests.ranks import run_on_ranks
from tests.training.runs import (
    Mesh,
    build_plan,
    build_run,
    read_checkpoint,
    read_metrics,
    samples_seen,
    steps_of,
    train_here,
    write_text,
)

COMPARED = ("step", "epoch", "loss", "grad_norm", "learning_rate", "tokens", "trained_tokens")
Seen = dict[int, tuple[list[int], list[list[int]]]]


def train_on_ranks(config: RunConfig) -> Seen:
    """Train on as many ranks as the plan needs, and return the inputs of each step."""
    mesh = config.plan.mesh
    return samples_seen(
        run_on_ranks(mesh.pp * mesh.dp_replicate * mesh.dp_shard * mesh.tp, train_here, config, joins=False)
    )


def stopped_after(config: RunConfig, step: int, name: str) -> RunConfig:
    """Copy a finished run as if it had been killed before the first checkpoint after `step`."""
    whole, cut = Path(config.run_directory), Path(config.run_directory).with_name(name)
    shutil.copytree(whole, cut)
    for checkpoint in (cut / CHECKPOINTS_NAME).iterdir():
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    return config.model_copy(update={"run_directory": str(cut)})


def values(config: RunConfig) -> list[dict[str, float]]:
    """Return the written metrics of the steps that are not times or memory sizes."""
    return [{name: metrics[name] for name in COMPARED} for metrics in steps_of(Path(config.run_directory))]


def assert_same_bits(whole: RunConfig, resumed: RunConfig) -> None:
    """Compare weights, moments and metrics."""
    assert values(resumed) == values(whole)
    expected, found = (read_checkpoint(Path(config.run_directory)) for config in (whole, resumed))
    assert found.keys() == expected.keys()
    assert any(name.startswith("optimizer.exp_avg_sq.") for name in found)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def in_float32(mesh: Mesh) -> ParallelPlan:
    """Return a plan in the default number format of runs."""
    return build_plan(mesh).model_copy(update={"precision": PrecisionPlan()})


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("gpt2-dropout", build_plan((2, 1, 1, 2))),
        ("gpt2-dropout", in_float32((1, 1, 2, 1))),
        ("qwen3", build_plan((1, 1, 2, 2), sequence_parallel=True)),
        ("qwen3", build_plan((2, 1, 1, 1), schedule="Interleaved1F1B")),
    ],
    ids=["gpt2-pp-tp", "gpt2-float32-fsdp", "qwen3-fsdp-tp", "qwen3-interleaved"],
)
def test_same_mesh_resumes_with_the_same_bits(tmp_path: Path, model: str, plan: ParallelPlan) -> None:
    saving = CheckpointConfig(every=3, in_background=model == "qwen3")
    whole = build_run(tmp_path / "whole", model, plan, checkpoint=saving)
    seen = train_on_ranks(whole)
    resumed = stopped_after(whole, 3, "resumed")
    assert train_on_ranks(resumed) == {step: seen[step] for step in (3, 4, 5)}
    assert_same_bits(whole, resumed)


CHAIN = (
    build_plan((1, 1, 2, 1)),
    build_plan((4, 1, 1, 1)),
    build_plan((2, 1, 2, 1)),
    build_plan((1, 1, 1, 4)),
    build_plan((1, 2, 1, 2)),
    build_plan((2, 1, 1, 1), schedule="ZBVZeroBubble"),
    build_plan((2, 1, 1, 2), sequence_parallel=True),
    build_plan((1, 1, 1, 1)),
    build_plan((2, 1, 1, 2)),
)


def test_levels_of_sharding_resume_each_other(tmp_path: Path) -> None:
    def with_level(mesh: Mesh, level: Literal[1, 2, 3]) -> ParallelPlan:
        return build_plan(mesh).model_copy(update={"shard": ShardPlan(level=level)})

    two, four = (1, 1, 2, 1), (2, 1, 2, 1)
    plans = [with_level(two, 3), with_level(two, 1), with_level(four, 2), with_level(two, 3)]
    whole = build_run(tmp_path / "whole", "gpt2", plans[0], steps=len(plans))
    expected = train_on_ranks(whole)
    traveling = build_run(tmp_path / "traveling", "gpt2", plans[0], steps=1)
    seen = {}
    for step, plan in enumerate(plans, start=1):
        seen |= train_on_ranks(traveling.model_copy(update={"plan": plan, "steps": step}))
    assert seen == expected
    for one, other in zip(values(traveling), values(whole), strict=True):
        assert one == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize("model", ["gpt2", "qwen3"])
def test_other_meshes_resume_with_the_same_losses(tmp_path: Path, model: str) -> None:
    """Change the mesh after every step, and return to the first."""
    steps = 1 + len(CHAIN)
    whole = build_run(tmp_path / "whole", model, CHAIN[-1], steps=steps)
    expected = train_on_ranks(whole)
    traveling = build_run(tmp_path / "traveling", model, CHAIN[-1], steps=1)
    seen = train_on_ranks(traveling)
    for step, plan in enumerate(CHAIN, start=2):
        seen |= train_on_ranks(traveling.model_copy(update={"plan": plan, "steps": step}))
    assert seen == expected
    pairs = list(zip(steps_of(tmp_path / "whole"), steps_of(tmp_path / "traveling"), strict=True))
    assert [found["step"] for _, found in pairs] == list(range(1, steps + 1))
    for name in ("loss", "grad_norm"):
        errors = [abs(found[name] - wanted[name]) / wanted[name] for wanted, found in pairs]
        print(model, name, [f"{error:.0e}" for error in errors])
        assert max(errors) <= 1e-12
    weights, wanted = read_checkpoint(tmp_path / "traveling"), read_checkpoint(tmp_path / "whole")
    assert weights.keys() == wanted.keys()
    assert max(float((weights[name] - wanted[name]).abs().max()) for name in wanted) <= 1e-12


def test_epochs_filled_batches_and_padded_samples_resume(tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl", documents=20)
    changes: dict[str, Any] = {
        "form": "padded",
        "steps": None,
        "epochs": 2,
        "checkpoint": CheckpointConfig(every=1, keep=9),
    }
    whole = build_run(tmp_path / "whole", "gpt2", build_plan((1, 1, 2, 1)), **changes)
    whole = whole.model_copy(update={"data": whole.data.model_copy(update={"drop_last": False})})
    expected = train_on_ranks(whole)
    first, second = ([ids for step in epoch for ids in expected[step][0]] for epoch in ((0, 1, 2), (3, 4, 5)))
    assert sorted(first) == sorted(second) == [-1] * 4 + list(range(20))
    assert first != second
    assert [metrics["epoch"] for metrics in values(whole)] == [1, 1, 1, 2, 2, 2]

    at_the_border = stopped_after(whole, 3, "border")
    assert train_on_ranks(at_the_border) == {step: expected[step] for step in (3, 4, 5)}
    assert_same_bits(whole, at_the_border)

    elsewhere = stopped_after(whole, 2, "elsewhere").model_copy(update={"plan": build_plan((2, 1, 1, 1))})
    assert train_on_ranks(elsewhere) == {step: expected[step] for step in (2, 3, 4, 5)}
    losses = [[metrics["loss"] for metrics in values(config)] for config in (whole, elsewhere)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    # The average of an epoch includes its steps before the stop.
    epochs = [[m for m in read_metrics(Path(c.run_directory)) if "epoch_loss" in m] for c in (whole, elsewhere)]
    assert [metrics["epoch_steps"] for metrics in epochs[1]] == [3, 3]
    assert [m["epoch_loss"] for m in epochs[1]] == pytest.approx([m["epoch_loss"] for m in epochs[0]], rel=1e-12)


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Return a run that has done its only step; the test runs beside its directory."""
    monkeypatch.chdir(tmp_path)
    config = build_run(tmp_path / "out", "gpt2", build_plan((1, 1, 1, 1)), steps=1)
    train_on_ranks(config)
    return config


def refusal(config: RunConfig) -> list[str]:
    """Train in this process, and return the problems."""
    with pytest.raises(UserError) as caught:
        train_run(config)
    if dist.is_initialized():
        dist.destroy_process_group()
    return list(caught.value.lines)


def test_directory_of_another_run_is_refused(stopped: RunConfig) -> None:
    optimizer = stopped.optimizer.model_copy(update={"learning_rate": 0.5})
    model = stopped.model.model_copy(update={"config": {**stopped.model.config, "n_embd": 64, "n_inner": 8}})
    other = stopped.model_copy(update={"seed": 7, "optimizer": optimizer, "model": model, "steps": 9})
    assert refusal(other) == [
        "out/run.toml: model.config.n_embd is 32 in that file and 64 in this run",
        "out/run.toml: model.config.n_inner is not set in that file and 8 in this run",
        "out/run.toml: optimizer.learning_rate is 0.01 in that file and 0.5 in this run",
        "out/run.toml: seed is 0 in that file and 7 in this run",
        "out holds another run; choose another run_directory, resume that run unchanged, or, to continue it with "
        "other settings, change out/run.toml too",
    ]


def test_run_of_a_time_before_a_key_resumes(stopped: RunConfig) -> None:
    path = Path(stopped.run_directory) / "run.toml"
    written = path.read_text()
    assert 'name = "adamw"\n' in written
    path.write_text(written.replace('name = "adamw"\n', "").replace("groups = []\n", ""))
    check_directory(stopped)
    lion = stopped.model_copy(update={"optimizer": OptimizerConfig(name="lion", learning_rate=0.01)})
    assert "out/run.toml: optimizer.name is 'adamw' in that file and 'lion' in this run" in refusal(lion)


def refusals_without_permission(config: RunConfig) -> list[str]:
    """Use run directories and a run file for which this user lacks permission."""
    if os.getuid() == 0:
        os.setuid(65534)
    with tempfile.TemporaryDirectory() as place:
        found = []
        for name, mode in (("readable", 0o500), ("locked", 0o000)):
            Path(place, name).mkdir(mode=mode)
            directory = f"{place}/{name}/some/where"
            found += refusal(config.model_copy(update={"run_directory": directory}))
        with pytest.raises(UserError) as caught:
            load_run(f"{place}/locked/run.toml", [f"plan={place}/locked/plan.toml"])
        return [problem.replace(place, "") for problem in [*found, *caught.value.lines]]


def test_directories_without_permission_are_refused(tmp_path: Path) -> None:
    config = build_run(tmp_path / "out", "gpt2", build_plan((1, 1, 1, 1)))
    (message,) = run_on_ranks(1, refusals_without_permission, config, joins=False)
    assert message == [
        "run_directory = /readable/some/where: /readable is not writable; choose another directory",
        "run_directory = /locked/some/where: /locked is not writable; choose another directory",
        "/locked/run.toml: cannot be read: Permission denied",
        "/locked/plan.toml: cannot be read: Permission denied",
    ]


def test_changed_length_is_reported(tmp_path: Path) -> None:
    config = build_run(tmp_path / "out", "gpt2", build_plan((1, 1, 1, 1)), steps=1)

    def message(**changes: Any) -> str | None:
        return changed_length(config.model_copy(update=changes))

    assert message(steps=4000) is None
    write_resolved(config, config.plan)
    assert message() is None
    assert message(steps=4000) == "steps was 1 and is 4,000"
    # Only the data determines which of the two is longer.
    assert message(steps=None, epochs=1) is None
    write_resolved(config.model_copy(update={"steps": None, "epochs": 1200}), config.plan)
    assert message(steps=None, epochs=2) == "epochs was 1,200 and is 2"


def test_directory_without_progress_may_be_reused(stopped: RunConfig) -> None:
    out = Path(stopped.run_directory)
    shutil.rmtree(out / CHECKPOINTS_NAME)
    other = stopped.model_copy(update={"seed": 7})
    assert len(refusal(other)) == 2
    (out / "metrics.jsonl").write_text("")
    train_on_ranks(other)
    assert "seed = 7" in (out / "run.toml").read_text()


def test_checkpoint_of_another_model_is_refused(stopped: RunConfig) -> None:
    (Path(stopped.run_directory) / "run.toml").unlink()
    checkpoint = "out/checkpoints/step-1"
    last = "out holds another run; choose another run_directory, or restore the settings that this one started with"

    wider = stopped.model.model_copy(update={"config": {**stopped.model.config, "n_inner": 64}})
    message = refusal(stopped.model_copy(update={"model": wider}))
    assert message == [
        f"{checkpoint}: model.config.n_inner is None in the checkpoint and 64 in this run",
        f"{checkpoint}: 12 of its tensors differ: transformer.h.0.mlp.c_fc.bias is (128,) in the checkpoint and "
        "(64,) in this run, transformer.h.0.mlp.c_fc.weight is (32, 128) in the checkpoint and (32, 64) in this run, "
        "transformer.h.0.mlp.c_proj.weight is (128, 32) in the checkpoint and (64, 32) in this run and 9 more",
        last,
    ]
    # The shapes alone would not differ.
    heads = stopped.model.model_copy(update={"config": {**stopped.model.config, "n_head": 2}})
    assert refusal(stopped.model_copy(update={"model": heads})) == [
        f"{checkpoint}: model.config.n_head is 4 in the checkpoint and 2 in this run",
        last,
    ]
    qwen3 = refusal(build_run(Path(stopped.run_directory), "qwen3", stopped.plan))
    assert qwen3[0] == f"{checkpoint}: the model is a gpt2 in the checkpoint and a qwen3 in this run"
    assert "lm_head" not in qwen3[1]
    assert "model.embed_tokens.weight is not set in the checkpoint and (300, 32) in this run" in qwen3[1]
    assert qwen3[2:] == [last]


def test_checkpoint_of_other_data_or_another_order_is_refused(stopped: RunConfig) -> None:
    write_text(Path("text.jsonl"), seed=1)
    assert refusal(stopped) == [
        "out/checkpoints/step-1: the data is not what it was trained on: text, tokenizer, form or length has changed",
        "out holds another run; choose another run_directory, or restore the settings that this one started with",
    ]
    write_text(Path("text.jsonl"))
    (Path(stopped.run_directory) / "run.toml").unlink()
    precision = PrecisionPlan(parameters="float32", compute="float32", reduce="float32")
    plan = stopped.plan.model_copy(update={"precision": precision})
    data = stopped.data.model_copy(update={"shuffle": False})
    assert refusal(stopped.model_copy(update={"seed": 3, "global_batch_size": 4, "plan": plan, "data": data}))[:-1] == [
        "out/checkpoints/step-1: data.shuffle is True in the checkpoint and False in this run",
        "out/checkpoints/step-1: global_batch_size is 8 in the checkpoint and 4 in this run",
        "out/checkpoints/step-1: plan.precision.parameters is 'float64' in the checkpoint and 'float32' in this run",
        "out/checkpoints/step-1: seed is 0 in the checkpoint and 3 in this run",
    ]


def test_newest_checkpoints_are_kept_and_the_last_step_is_saved_once(tmp_path: Path) -> None:
    config = build_run(
        tmp_path / "out",
        "gpt2",
        build_plan((1, 1, 1, 1)),
        checkpoint=CheckpointConfig(every=2, keep=2),
        data=build_run(tmp_path / "out", "gpt2", build_plan((1, 1, 1, 1))).data.model_copy(update={"validation": 0.2}),
        evaluation=EvaluationConfig(every=4),
    )
    train_on_ranks(config)
    out = Path(config.run_directory)
    assert sorted(path.name for path in (out / CHECKPOINTS_NAME).iterdir()) == ["step-4", "step-6"]
    objects = read_metrics(out)
    assert [metrics["step"] for metrics in objects if "checkpoint_seconds" in metrics] == [2, 4, 6]
    assert [metrics["step"] for metrics in objects if "eval_loss" in metrics] == [4, 6]
    assert [metrics["step"] for metrics in objects if "epoch_steps" in metrics] == [6]


def test_finished_run_says_so_and_changes_nothing(stopped: RunConfig) -> None:
    out = Path(stopped.run_directory)
    Path("run.toml").write_text(dump_toml(stopped))
    metrics, saved = (out / "metrics.jsonl").read_bytes(), (out / "checkpoints/step-1").stat()
    command = [sys.executable, "-m", "meshtrain", "train", "run.toml"]
    shown = subprocess.run(command, capture_output=True, text=True, env=without_torchrun())
    assert (shown.returncode, shown.stderr) == (0, "")
    resumed, checksum, nothing = shown.stdout.splitlines()[-3:]
    assert resumed == "Resumed from out/checkpoints/step-1: step 1 done"
    assert checksum.startswith("Parameters checksum ")
    assert nothing == "Nothing to do: 1 of 1 steps are done; raise `steps` to continue"
    assert (out / "metrics.jsonl").read_bytes() == metrics
    assert (out / "checkpoints/step-1").stat() == saved


def without_torchrun() -> dict[str, str]:
    """Return the environment of a user's shell."""
    return {**os.environ, "TORCH_DISTRIBUTED_DEBUG": "OFF"}


def test_run_with_a_killed_rank_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """Run torchrun with two ranks, kill one with SIGKILL, then run the same command again."""
    plan = in_float32((1, 1, 1, 2))
    changes: dict[str, Any] = {"steps": 16, "checkpoint": CheckpointConfig(every=3)}
    whole = build_run(tmp_path / "whole", "gpt2-dropout", plan, **changes)
    train_on_ranks(whole)
    killed = build_run(tmp_path / "killed", "gpt2-dropout", plan, **changes)
    (tmp_path / "run.toml").write_text(dump_toml(killed))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "meshtrain", "train", str(tmp_path / "run.toml")]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=without_torchrun())
    wait_for(tmp_path / "killed" / CHECKPOINTS_NAME / "step-3", process=first)
    _, second_rank = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    os.kill(int(second_rank), signal.SIGKILL)
    assert first.wait(timeout=60) == 1
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('\0\0\n{"step": 15, "lo')
    again = subprocess.run(command, capture_output=True, text=True, env=without_torchrun())
    assert again.returncode == 0, again.stderr
    assert "Resumed from" in again.stdout
    assert_same_bits(whole, killed)


def test_damaged_checkpoint_is_ignored_and_the_run_ends_equal(tmp_path: Path) -> None:
    whole = build_run(tmp_path / "whole", "gpt2-dropout", in_float32((1, 1, 1, 2)))
    seen = train_on_ranks(whole)
    damaged = stopped_after(whole, 6, "damaged")
    file = Path(damaged.run_directory) / CHECKPOINTS_NAME / "step-6" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert train_on_ranks(damaged) == {step: seen[step] for step in (3, 4, 5)}
    assert_same_bits(whole, damaged)


def wait_for(path: Path, *, process: subprocess.Popen) -> None:
    """Wait until a file exists."""
    for _ in range(1200):
        if path.exists():
            return
        assert process.poll() is None, "the process ended before"
        time.sleep(0.05)
    pytest.fail(f"no {path} within a minute")
