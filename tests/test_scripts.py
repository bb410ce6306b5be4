"""The scripts as users start them: from any directory, in a copy of the repository."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.training.runs import write_text

ROOT = Path(__file__).parents[1]
NEEDED = ("launch", "meshtrain", "parallel_plans", "pyproject.toml", "constraints.txt", "README.md")
SCRIPTS = sorted((ROOT / "launch").glob("*.sh"))
EXPECTED = (
    "== meshtrain train launch/runs/quickstart.toml --processes 4 run_directory=runs/",
    "Data: train ",
    "mesh        pp 2 x dp_replicate 1 x dp_shard 1 x ep 1 x cp 1 x tp 2",
    "    0     0-1   embedding, layers 0-",
    "global batch 4 sequences = 1 per microbatch x 4 microbatches x 1 data-parallel; x ",
    "step 1/4  loss ",
    "step 2/4  eval loss ",
    "Saved runs/quickstart/checkpoints/step-2",
    "Validation loss ",
    "== meshtrain export runs/quickstart runs/quickstart/huggingface",
    "== meshtrain generate runs/quickstart/huggingface --prompt ",
    "def read_file(path):",
    "What to try next",
)
SMALL = (
    "steps=4",
    "global_batch_size=4",
    "micro_batch_size=1",
    "model.config.n_embd=16",
    "model.config.n_head=2",
    "evaluation.every=2",
    "evaluation.max_batches=1",
    "checkpoint.every=2",
    "logging.every=1",
)


def copy_repository(copy: Path) -> None:
    """Copy the files of a clone, with the environment of these tests as the installed one."""
    for name in NEEDED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    (copy / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        if not entry.name.startswith("installed-"):
            (copy / ".venv" / entry.name).symlink_to(entry)
    installed = b"".join((copy / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    (copy / ".venv" / "installed-base").write_text(f"{hashlib.sha256(installed).hexdigest()}  -\n")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository from which scripts are started."""
    copy = tmp_path_factory.mktemp("clone") / "with space"
    copy_repository(copy)
    return copy


def start(script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script from the directory above its repository, without variables of these tests."""
    kept = ("HOME", "LANG", "PATH", "TMPDIR", "CUDA_VISIBLE_DEVICES")
    environment = {name: value for name, value in os.environ.items() if name in kept} | variables
    # The code is that of the copy, whichever checkout is installed.
    environment["PYTHONPATH"] = str(script.parents[1])
    command = [str(script), *arguments]
    return subprocess.run(command, cwd=script.parents[2], env=environment, capture_output=True, text=True)


def quickstart(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the quickstart."""
    return start(repository / "launch" / "quickstart.sh", *arguments)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_every_script_is_valid_and_executable(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert os.access(script, os.X_OK) == script.read_text().startswith("#!/usr/bin/env bash\n")


def test_quickstart_trains_exports_and_generates(repository: Path) -> None:
    text = write_text(repository / "text.jsonl", documents=400)
    data = (f'data.train=["{text}"]', "data.validation=0.2", f'data.cache_directory="{repository}/cache"')
    shown = quickstart(repository, *SMALL, *data)
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = [line.rstrip() for line in shown.stdout.splitlines()]
    places = {start: [number for number, line in enumerate(lines) if line.startswith(start)] for start in EXPECTED}
    assert [start for start, found in places.items() if not found] == [], shown.stdout
    first = [found[0] for found in places.values()]
    assert first == sorted(first), shown.stdout
    assert [line.partition("  ")[0] for line in lines if line.startswith("step ")] == [
        "step 1/4",
        "step 2/4",
        "step 2/4",
        "step 3/4",
        "step 4/4",
        "step 4/4",
    ]
    exported = repository / "runs" / "quickstart" / "huggingface"
    model, loaded = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert (type(model).__name__, model.config.n_embd) == ("GPT2LMHeadModel", 16)
    assert not any(loaded[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (
        AutoTokenizer.from_pretrained(exported).decode(AutoTokenizer.from_pretrained(exported)("rows").input_ids)
        == "rows"
    )


def test_quickstart_error_is_one_line_and_removes_nothing(repository: Path) -> None:
    finished = repository / "runs" / "quickstart" / "huggingface"
    finished.mkdir(parents=True, exist_ok=True)
    shown = quickstart(repository, "steps=abc")
    problem = "error: command line: steps: expected a whole number from 1, found the string 'abc'\n"
    assert (shown.returncode, shown.stdout, shown.stderr) == (2, "", problem)
    assert finished.is_dir()


def test_quickstart_refuses_the_directory_of_another_unfinished_run(repository: Path) -> None:
    out = repository / "other"
    out.mkdir()
    (out / "run.toml").write_text("seed = 3\n")
    (out / "metrics.jsonl").write_text('{"step": 1}\n')
    shown = quickstart(repository, f"run_directory={out}")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert "error: other/run.toml: seed is 3 in that file and 0 in this run" in shown.stderr.splitlines()


def local(repository: Path, *arguments: str, processes: int) -> subprocess.CompletedProcess[str]:
    """Run launch/local.sh on the CPU."""
    return start(
        repository / "launch" / "local.sh", *arguments, PROCESSES=str(processes), CUDA_VISIBLE_DEVICES="", NO_COLOR="1"
    )


def test_local_script_trains_and_resumes_a_run_outside_the_repository(repository: Path) -> None:
    text = write_text(repository / "text.jsonl", documents=400)
    (repository.parent / "mine").mkdir()
    run, out = repository.parent / "mine" / "run.toml", repository.parent / "mine" / "out"
    shutil.copy(repository / "launch" / "runs" / "quickstart.toml", run)
    data = (f'data.train=["{text}"]', "data.validation=0.2", f'data.cache_directory="{repository}/cache"')
    arguments = ("mine/run.toml", *SMALL, *data, f'run_directory="{out}"', "plan.mesh.pp=1")
    stopped = local(repository, *arguments, "stop_after=0s", processes=2)
    assert stopped.returncode == 75, stopped.stderr
    assert "Stopped by stop_after: 1 of 4 steps are done" in stopped.stdout
    ended = local(repository, *arguments, processes=2)
    assert ended.returncode == 0, ended.stderr
    assert "step 1 done" in ended.stdout
    assert ended.stdout.splitlines()[-1].startswith("Done.")


def test_local_script_reports_user_errors_before_it_starts_processes(repository: Path) -> None:
    run = "launch/runs/quickstart.toml"
    mistaken = local(repository, run, "steps=abc", processes=4)
    problem = "error: command line: steps: expected a whole number from 1, found the string 'abc'\n"
    assert (mistaken.returncode, mistaken.stdout, mistaken.stderr) == (2, "", problem)
    alone = local(repository, run, processes=0)
    assert (alone.returncode, alone.stdout) == (2, "")
    assert alone.stderr.startswith("error: this machine has no GPU; ")
    result = local(repository, processes=4)
    assert (result.returncode, result.stdout) == (2, "")
    assert "./launch/local.sh RUN [KEY=VALUE ...]\n" in result.stderr
