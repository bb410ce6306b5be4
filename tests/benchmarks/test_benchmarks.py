"""The benchmarks run, at a size that says nothing about speed."""

import os
import subprocess
import sys

from tests.benchmarks.bare import LAYOUTS
from tests.benchmarks.tokenising import installed


def run_benchmark(*arguments: str) -> list[list[str]]:
    # Not in these processes: with the checks that the test suite switches on, DistributedDataParallel crashes (2.13).
    environment = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    command = [sys.executable, "-m", *arguments, "--small"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_both_sides_of_the_throughput_benchmark_train_in_every_layout() -> None:
    _, *rows = run_benchmark("tests.benchmarks.throughput", "--steps", "1")
    assert [" ".join(row[:2]) for row in rows] == list(LAYOUTS)
    assert all(float(row[-1]) > 0 for row in rows)


def test_the_tokenising_benchmark_measures_every_contender() -> None:
    lines = run_benchmark("tests.benchmarks.tokenising")
    rows = {row[0]: row for row in lines if row and row[0] in installed()}
    assert {"bare", "meshtrain"} <= rows.keys() == set(installed())
    # All write the same number of tokens.
    assert len({row[-1] for row in rows.values()}) == 1
    assert [row[:4] for row in lines[-2:]] == [["peak", "memory", "of", "meshtrain"]] * 2


def test_the_checkpoint_benchmark_measures_every_contender() -> None:
    _, *rows, hashing, stall = run_benchmark("tests.benchmarks.checkpoints", "--repeat", "1")
    names = [" ".join(word for word in row if word.isalpha()) for row in rows]
    save, load = (
        ["disk write s", "dcp save s", "save s", "stall s"],
        ["disk read s", "dcp load s", "verify s", "load s"],
    )
    assert names == save + load
    assert (hashing[:2], stall[:2]) == (["hashing", "and"], ["training", "stands"])
