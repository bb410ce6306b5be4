"""Wrong profiles are refused before anything starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshtrain.config.toml import load_run
from meshtrain.errors import ConfigError
from tests.training.runs import LLAMA_TEXT, RUN_TEXT, write_text


def write_run(directory: Path, steps: str) -> Path:
    write_text(directory / "text.jsonl")
    path = directory / "run.toml"
    path.write_text(f"{RUN_TEXT}\n{LLAMA_TEXT}\n[profile]\nsteps = {steps}\n")
    return path


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("[2]", "profile: `steps` = [2], but a profile has a first and a last step; write them as [20, 22]"),
        (
            "[1, 3]",
            "profile: `steps` = [1, 3], but the first step builds and compiles, so its times say nothing about the "
            "others; begin with step 2 or later",
        ),
        (
            "[3, 3]",
            "profile: `steps` = [3, 3] must be 2 to 20 steps: the last one is traced, which takes time, and those "
            "before it are timed; write [3, 5]",
        ),
        (
            "[2, 22]",
            "profile: `steps` = [2, 22] must be 2 to 20 steps: the last one is traced, which takes time, and those "
            "before it are timed; write [2, 4]",
        ),
        ("[0, 2]", "profile.steps: expected a list of whole numbers from 1, found [0, 2]"),
        ("3", "profile.steps: expected a list of whole numbers from 1, found 3"),
        (
            "[6, 7]",
            "`profile.steps` = [6, 7], but the run ends after step 6; choose earlier steps, or leave the key out",
        ),
    ],
)
def test_wrong_steps_are_refused(tmp_path: Path, steps: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(write_run(tmp_path, steps), [])
    (line,) = caught.value.lines
    assert line.endswith(message)


def test_command_refuses_wrong_steps_in_one_line(tmp_path: Path) -> None:
    path = write_run(tmp_path, "[1, 3]")
    command = [sys.executable, "-m", "meshtrain", "train", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "begin with step 2 or later" in line


def test_steps_may_be_as_many_as_the_run_has(tmp_path: Path) -> None:
    assert load_run(write_run(tmp_path, "[5, 6]"), []).profile.steps == [5, 6]
