"""The benchmarks run, at a size that says nothing about speed."""

import os
import subprocess
import sys

from tests.benchmarks.bare import LAYOUTS


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


def test_the_checkpoint_benchmark_measures_every_contender() -> None:
    _, *rows, hashing, stall = run_benchmark("tests.benchmarks.checkpoints", "--repeat", "1")
    names = [" ".join(word for word in row if word.isalpha()) for row in rows]
    save, load = (
        ["disk write s", "dcp save s", "save s", "stall s"],
        ["disk read s", "dcp load s", "verify s", "load s"],
    )
    assert names == save + load
    assert (hashing[:2], stall[:2]) == (["hashing", "and"], ["training", "stands"])


def test_the_deduplication_benchmark_compares_with_the_exact_truth() -> None:
    *_, header, ours, datatrove, rensa = run_benchmark("tests.benchmarks.deduplication")
    assert header == ["tool", "docs/s", "MB/s", "recall", "-0.9", "precision", "removed", "wrong", "missed"]
    assert [row[0] for row in (ours, datatrove, rensa)] == ["meshtrain", "datatrove", "rensa"]
    # The recall of so few pairs says little; that none is wrongly removed is certain.
    assert (ours[5], ours[7]) == ("1.0000", "0")
    assert int(ours[6]) > 20
