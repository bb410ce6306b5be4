"""The rank spawner of the test suite."""

import importlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_on_ranks


def sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("one is wrong")


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def die_before_anything() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(3)


def crash(message: Path) -> None:
    with message.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.abort()


def import_more() -> set[str]:
    """Import what most tests use, and return the modules that were not loaded before."""
    before = {*sys.modules}
    for module in (
        "api.parallelize",
        "training.run",
        "verify.prove",
        "inference.prompts",
        "checkpoint.huggingface.convert",
    ):
        importlib.import_module(f"meshtrain.{module}")
    return {*sys.modules} - before


def test_rank_starts_with_its_imports() -> None:
    assert run_on_ranks(1, import_more) == [set()]


def test_results_come_back_in_rank_order() -> None:
    assert run_on_ranks(4, sum_of_ranks) == [6.0] * 4


def test_exception_on_one_rank_reaches_the_test() -> None:
    with pytest.raises(RankError, match="one is wrong") as caught:
        run_on_ranks(2, fail_on_one)
    assert isinstance(caught.value.original, ValueError)


def test_killed_rank_is_reported() -> None:
    with pytest.raises(RankError, match=r"killed by SIGKILL|Connection closed|Connection reset"):
        run_on_ranks(2, die_on_one)
    with pytest.raises(RankError, match=r"^rank 0:\nended without an answer, killed by SIGKILL$"):
        run_on_ranks(1, die_before_anything, joins=False)


def test_rank_that_exits_is_reported() -> None:
    with pytest.raises(RankError, match=r"^rank 0:\nended without an answer, exit code 3$"):
        run_on_ranks(1, leave)


def test_crashed_rank_writes_its_stack(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"^rank 0:\nended without an answer, killed by SIGABRT$"):
        run_on_ranks(1, crash, tmp_path / "output")
    message = (tmp_path / "output").read_text()
    assert "Fatal Python error: Aborted" in message
    assert "in crash" in message


def test_unresponsive_ranks_are_named() -> None:
    with pytest.raises(RankError, match=r"^rank 0:\nno answer from ranks \[0, 1\] within 0\.5 s$"):
        run_on_ranks(2, time.sleep, 60, joins=False, timeout=0.5)
