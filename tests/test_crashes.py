"""A test whose rank crashes is run again."""

import os
import subprocess
import sys
from pathlib import Path


def test_crashed_test_is_shown_with_its_stack_and_run_again(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "tests/crashing.py"]
    environment = {**os.environ, "BEEN_HERE": str(tmp_path / "been")}
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "1 failed, 1 passed, 1 rerun in" in done.stdout, done.stdout
    failed, shown = done.stdout.split("= rerun test summary info =")
    # A rank that is killed is a failure as usual.
    assert "ended without an answer, killed by SIGKILL" in failed
    assert "RERUN tests/crashing.py::test_that_crashes_once" in shown
    assert "ended without an answer, killed by SIGSEGV" in shown
    assert shown.count("ProcessGroupGloo::runLoop") == 1
    assert "in crash_in_gloo" in shown
