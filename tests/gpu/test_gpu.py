"""The command for the GPU, on the CPU and on a CUDA device of the host, at tiny sizes."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.__main__ import _run_case
from tests.gpu.outcome import Failed, Numbers, Setting, Skipped
from tests.gpu.report import Row, write_report
from tests.host_cuda.build import environment, why_not

ROOT = Path(__file__).parents[2]
REASON = why_not()
needs_device = pytest.mark.skipif(REASON is not None, reason=f"no CUDA device on the host: {REASON}")


def run(*arguments: str, devices: int = 0) -> tuple[int, str, str]:
    """Run the command, and return its exit code, output and errors."""
    command = [sys.executable, "-m", "tests.gpu", *arguments]
    variables = environment(devices) if devices else dict(os.environ)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=280)
    finally:
        # Its parts must not outlive a test that has failed.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def results(folder: Path) -> dict[str, str]:
    """Return part and case -> status, from the JSON file."""
    rows = json.loads((folder / "results.json").read_text())["rows"]
    return {f"{row['part']}, {row['case']}": row["status"] for row in rows}


def run_small(folder: Path, *parts: str, devices: int = 0) -> dict[str, str]:
    device = [] if devices else ["--device", "cpu"]
    code, out, err = run(*parts, *device, "--small", "--out", str(folder), devices=devices)
    logs = "".join(log.read_text()[-2000:] for log in folder.glob("*.log"))
    assert code == 0, out + err + logs
    return results(folder)


def test_without_a_gpu_it_says_so() -> None:
    code, out, err = run()
    assert (code, out) == (2, "")
    assert err == "error: there is no GPU; add --device cpu --small to see on the CPU that the parts work\n"


def test_list_shows_the_parts() -> None:
    code, out, _ = run("--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()][:2] == ["parity", "quickstart"]


def test_steps_are_checked_on_the_cpu(tmp_path: Path) -> None:
    found = run_small(tmp_path, "float16", "float8", "memory")
    assert found == {
        "float16, scaled": "passed",
        "float16, overflow": "passed",
        "float8, rowwise": "passed",
        "float8, tensorwise": "passed",
        "float8, mxfp8": "passed",
        "memory, GPT-2 124M": "skipped",
        "memory, Llama 1B": "skipped",
        "memory, Llama 8B": "skipped",
    }
    assert "| float16 | overflow | passed | loss_scale" in (tmp_path / "results.md").read_text()


@needs_device
def test_steps_are_checked_and_measured_on_a_device(tmp_path: Path) -> None:
    found = run_small(tmp_path, "parity", "offload", "memory", devices=1)
    assert len(found) == 8
    assert set(found.values()) == {"passed"}
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    differences = [row["numbers"]["difference"] for row in rows if row["part"] == "memory"]
    assert all(abs(difference) < 0.1 for difference in differences), differences


@needs_device
def test_other_steps_on_a_device(tmp_path: Path) -> None:
    found = run_small(tmp_path, "float16", "compile", "attention", "throughput", devices=1)
    assert {name for name, status in found.items() if status != "passed"} == {
        "attention, flash_attention_2",
        "attention, flex_attention",
    }


@needs_device
@pytest.mark.parametrize("part", ["quickstart", "gpt2-124m", "profile"])
def test_commands_on_a_device(part: str, tmp_path: Path) -> None:
    assert set(run_small(tmp_path, part, devices=1).values()) == {"passed"}


@needs_device
def test_two_processes_need_two_devices(tmp_path: Path) -> None:
    assert set(run_small(tmp_path / "one", "processes", devices=1).values()) == {"skipped"}
    assert "needs 2 GPUs, found 1" in (tmp_path / "one" / "results.md").read_text()


@needs_device
def test_two_processes_on_two_devices(tmp_path: Path) -> None:
    found = run_small(tmp_path, "processes", devices=2)
    assert {name for name, status in found.items() if status == "passed"} == {
        f"processes, {axis}" for axis in ("dp_shard", "tp", "pp", "cp")
    }
    assert {found["processes, ep"], found["processes, async_tp"]} == {"skipped"}


def test_other_steps_on_the_cpu(tmp_path: Path) -> None:
    found = run_small(tmp_path, "parity", "offload", "compile", "attention", "throughput")
    assert set(found.values()) == {"passed", "skipped"}
    assert found["attention, sdpa, flash kernel"] == "passed"


def test_two_processes_on_the_cpu(tmp_path: Path) -> None:
    found = run_small(tmp_path, "processes")
    assert {name for name, status in found.items() if status != "passed"} == {"processes, async_tp"}


def test_parts_that_begin_too_late_are_skipped(tmp_path: Path) -> None:
    code, _, _ = run("parity", "--device", "cpu", "--small", "--minutes", "0", "--out", str(tmp_path))
    assert code == 0
    assert set(results(tmp_path).values()) == {"skipped"}
    assert "the 0 minutes are over" in (tmp_path / "results.md").read_text()


def test_failure_is_reported_in_one_line_and_the_rest_goes_on(tmp_path: Path, capsys: Any) -> None:
    def fails(setting: Setting) -> Numbers:
        raise Failed("loss 3, expected 2", {"loss": 3.0})

    def breaks(setting: Setting) -> Numbers:
        raise RuntimeError("CUDA error: an illegal | address\nmore lines")

    def lacks(setting: Setting) -> Numbers:
        raise Skipped("no such kernel")

    setting = Setting("cpu", small=True, folder=tmp_path)
    rows = [_run_case(setting, "part", check.__name__, check) for check in (fails, breaks, lacks)]
    assert rows[0] == Row("part", "fails", "failed", {"loss": 3.0}, "loss 3, expected 2")
    assert rows[1].reason == "RuntimeError: CUDA error: an illegal | address"
    assert rows[2].status == "skipped"
    assert "Traceback" in capsys.readouterr().err
    write_report(tmp_path, {"torch": "2.13"}, rows)
    table = (tmp_path / "results.md").read_text()
    assert "| part | breaks | failed: RuntimeError: CUDA error: an illegal / address |  |" in table


def test_case_whose_process_dies_has_failed(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file where the folder of the part belongs")
    code, out, _ = run("profile", "--device", "cpu", "--small", "--out", str(tmp_path))
    assert code == 1
    assert "failed: its process ended with 1, see profile.log" in out
    assert "0 passed, 1 failed, 0 skipped" in out
