"""`meshtrain calibrate` measures this machine, and writes a description that `plan` takes."""

import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshtrain import cli
from meshtrain.compat.operators_seen import attention_of_cpu
from meshtrain.planning.calibration.calls import (
    LARGEST_BYTES,
    Call,
    TensorShape,
    record_calls,
    with_shorter_lists,
    with_values,
)
from meshtrain.planning.calibration.gpu_calls import attention_on_gpu, call_on_gpu
from meshtrain.planning.calibration.messages import link_of
from meshtrain.planning.calibration.operators import measure_operators
from meshtrain.runtime.process import process_group
from tests.planning.cases import PLANS, make_run
from tests.ranks import run_on_ranks

CPU = torch.device("cpu")


def calls_that_ran(model_type: str) -> list[tuple[Call, float]]:
    calls = record_calls([make_run(model_type, PLANS["one process"], microbatches=1)])
    with process_group() as device:
        points, others = measure_operators(calls, device)
    assert not others
    return [(call, dict(points[call.key])[float(call.size)]) for call in calls]


@pytest.mark.parametrize("model_type", ["gpt2", "mixtral"])
def test_every_operator_of_a_step_is_timed_by_itself(model_type: str) -> None:
    (found,) = run_on_ranks(1, calls_that_ran, model_type, joins=False)
    assert all(seconds > 0 for _, seconds in found)
    names = {call.key for call, _ in found}
    # The dropout of GPT-2 leaves attention in pieces on a CPU.
    own = {"gpt2": "addmm float32", "mixtral": "_scaled_dot_product_flash_attention_for_cpu float32"}[model_type]
    assert {own, "mm float32", "_fused_adamw_ float32"} <= names
    sizes: dict[str, list[int]] = {}
    for call, _ in found:
        sizes.setdefault(call.key, []).append(call.size)
    assert all(known == sorted(set(known)) and len(known) <= 6 for known in sizes.values())


def points_where_one_rank_fails() -> tuple[list[str], list[str]]:
    """Measure two products, of which the first has shapes that do not fit on one rank."""
    wide, tall = (TensorShape(shape, (shape[1], 1), torch.float32) for shape in ((2, 3), (3, 2)))
    first = wide if dist.get_rank() else tall
    calls = [Call("aten.mm.default", f"mm {it}", 12, 48, (wide, other), {}) for it, other in enumerate((first, tall))]
    # Its operators only know shapes. As on a GPU, one that does not run there is left out.
    points, others = measure_operators(calls, torch.device("meta"))
    dist.barrier()
    return [*points], [*others]


def test_a_call_that_fails_on_one_rank_does_not_stop_the_others() -> None:
    assert run_on_ranks(2, points_where_one_rank_fails) == [(["mm 0", "mm 1"], []), (["mm 1"], ["mm 0"])]


def test_an_update_of_all_parameters_is_timed_with_some_of_them() -> None:
    shapes = [TensorShape((size, 2**20), (2**20, 1), torch.float32) for size in (4, 1, 2)]
    # Each number is read and written once.
    call = Call("aten._foreach_mul_.Scalar", "_foreach_mul_ float32", 7 * 2**30, 7 * 2**30, (shapes, 2.0), {})
    assert with_shorter_lists(call).num_bytes == 2**30 == LARGEST_BYTES
    assert with_shorter_lists(call).args == ([shapes[1]], 2.0)
    half = replace(call, size=2**31, num_bytes=2**31)
    assert with_shorter_lists(half).args == ([shapes[1], shapes[2]], 2.0)
    assert with_shorter_lists(half).size == with_shorter_lists(half).num_bytes == 3 * 2**31 // 7
    for other in (
        replace(call, args=(shapes[0], 2.0)),
        replace(call, args=([shapes[0], TensorShape((1, 2), (2, 1), torch.float32)], 2.0)),
        replace(call, operator="fsdp.split_with_sizes_copy.default", key="split_with_sizes_copy float32"),
    ):
        assert with_shorter_lists(other) == other


@pytest.mark.parametrize("key_heads", [4, 2])
def test_gpus_run_the_attention_that_a_simulation_runs(key_heads: int) -> None:
    heads = [(2, 4, 8, 16), (2, key_heads, 8, 16), (2, key_heads, 8, 16)]
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in heads]
    name = "_scaled_dot_product_flash_attention_for_cpu"
    forward, backward = (getattr(torch.ops.aten, name + ending).default for ending in ("", "_backward"))
    output, sums = forward(*inputs, dropout_p=0.0, is_causal=True, scale=0.3)
    found = attention_on_gpu(f"aten.{name}.default", [*inputs, 0.0, True], {"scale": 0.3})()
    torch.testing.assert_close(found, output)
    arguments = [torch.ones_like(output), *inputs, output, sums, 0.0, True]
    run = attention_on_gpu(f"aten.{name}_backward.default", arguments, {"scale": 0.3})
    for _ in range(2):
        torch.testing.assert_close(run(), backward(*arguments, scale=0.3))
    assert attention_of_cpu("aten._scaled_dot_product_efficient_attention.default") is None


def test_gpus_keep_statistics_of_layers_in_float32() -> None:
    x = torch.randn(2, 8).bfloat16()
    _, mean, deviation = torch.ops.aten.native_layer_norm(x, [8], None, None, 1e-5)
    assert mean.dtype == torch.bfloat16, "as a simulation calls it"
    run = call_on_gpu(
        "aten.native_layer_norm_backward.default", [x, x, [8], mean, deviation, None, None, [True, False, False]], {}
    )
    assert run.args[3].dtype == run.args[4].dtype == torch.float32  # type: ignore[attr-defined]


def test_arguments_get_memory_of_the_same_shape() -> None:
    shapes = [TensorShape((2, 3), (1, 2), torch.float32), [TensorShape((4, 8), (0, 1), torch.bfloat16)], 3, "sum"]
    first, (second,), number, text = with_values(shapes, CPU)
    assert (first.shape, first.stride(), first.dtype) == ((2, 3), (1, 2), torch.float32)
    assert (second.shape, second.stride(), second.dtype) == ((4, 8), (0, 1), torch.bfloat16)
    assert (number, text) == (3, "sum")
    assert ((first >= 0.9) & (first <= 1.1)).all()
    rows = with_values(TensorShape((5,), (1,), torch.long), CPU)
    assert not rows.any(), "every table has a first row"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["machine.json"], "machine.json: the description of a machine is a .toml file"),
        (["nowhere/machine.toml"], "FILE: nowhere is not a directory"),
        (["machine.toml", "--processes", "0"], "--processes 0: expected a whole number from 1"),
        (["machine.toml", "no-run.toml"], "no file"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli._exit_code(["calibrate", *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_bandwidth_of_a_link_is_known_where_noise_hides_it() -> None:
    link = link_of([(1e3, 1e-5), (4e6, 1e-4), (16e6, 2.5e-4)])
    assert (link.seconds, link.gb_per_second) == (1e-5, pytest.approx(80))
    # The larger message seems to be the faster one.
    assert link_of([(1e3, 1e-5), (4e6, 3e-4), (16e6, 2e-4)]).gb_per_second == pytest.approx(80)


def meshtrain(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshtrain", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.timeout(900)
def test_description_of_this_machine_is_taken_by_plan(tmp_path: Path) -> None:
    done = meshtrain(tmp_path, "calibrate", "machine.toml", "--processes", "2")
    assert done.returncode == 0, done.stderr
    written = tomllib.loads((tmp_path / "machine.toml").read_text())
    speed = written["speed"]
    assert speed["processes_per_host"] == 2
    assert set(speed["messages"]) == {"all_reduce", "posted_all_reduce", "all_gather", "reduce_scatter", "send"}
    assert "speed.between_hosts" not in written["measured"]
    assert "speed.peak_tflops" in written["measured"]
    (tmp_path / "run.toml").write_text(RUN)
    planned = meshtrain(tmp_path, "plan", "run.toml", "--gpu", "machine.toml", "--world-size", "2")
    assert planned.returncode == 0, planned.stderr
    assert "A step takes" in planned.stdout


RUN = """
run_directory = "run"
steps = 10
global_batch_size = 8
micro_batch_size = 2
[model]
type = "llama"
config = { vocab_size = 300, hidden_size = 64, intermediate_size = 128, num_hidden_layers = 2, num_attention_heads = 2 }
[data]
sequence_length = 64
tokenizer.vocab_size = 300
[optimizer]
learning_rate = 1e-3
"""
