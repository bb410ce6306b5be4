"""When Python's garbage collector runs, and which objects it scans."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

import meshtrain
from meshtrain.runtime.garbage_collection import (
    NEVER,
    RARELY,
    freeze_objects,
    frozen_objects_released,
    rare_collections,
)
from meshtrain.training.hooks import Hook, Metrics, RunState
from tests.ranks import run_on_ranks
from tests.training.runs import build_plan, build_run
from tests.training.test_hooks import train_with

COUNT = """
import gc, sys
from collections import Counter
found = Counter()
gc.callbacks.append(lambda phase, info: found.update([f"{phase} {info['generation']}"]))
sys.argv = ["meshtrain", "plan", "launch/runs/quickstart.toml", "--world-size", "4"]
from meshtrain.cli import main
main()
print(len(sys.modules), found["start 2"])
"""


def test_command_line_starts_without_full_collections() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", COUNT], cwd=root, capture_output=True, text=True, check=True)
    modules, full = map(int, done.stdout.split("\n")[-2].split())
    assert modules > 1500
    assert full == 0


def test_thresholds_are_restored_after_an_exception() -> None:
    before = gc.get_threshold()

    @rare_collections()
    def fail() -> None:
        raise ValueError(gc.get_threshold())

    with pytest.raises(ValueError, match=rf"\({RARELY}, {before[1]}, {before[2]}\)"):
        fail()
    assert gc.get_threshold() == before


def full_collections_among_garbage() -> int:
    """Create garbage for a dozen middle collections; return the number of full collections."""
    found = []
    gc.callbacks.append(count := lambda phase, info: found.append((phase, info["generation"])))
    for _ in range(150_000):
        circle: list[object] = []
        circle.append(circle)
    gc.callbacks.remove(count)
    return found.count(("start", 2))


def test_live_objects_are_not_scanned_and_garbage_is_collected() -> None:
    class Node:
        me: "Node"

    gc.collect()
    with rare_collections(NEVER):
        # A quarter more than at the latest full collection would call for the next one.
        kept = [[] for _ in range(len(gc.get_objects()) // 2)]
        node = Node()
        node.me = node
    assert full_collections_among_garbage() == 0
    gone = weakref.ref(node)
    del node
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert gone() is None
    assert kept


def test_frozen_objects_stay_frozen() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with rare_collections():
            pass
        # Another thread of the test runner may drop a few of them meanwhile.
        assert gc.get_freeze_count() > before / 2
    finally:
        gc.unfreeze()


def test_public_name_is_loaded_once() -> None:
    found = meshtrain.load_plan
    assert vars(meshtrain)["load_plan"] is found


class CountsFrozen(Hook):
    """Counts the frozen objects after every step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_step(self, state: RunState, metrics: Metrics) -> None:
        self.counts.append(gc.get_freeze_count())


def train_counting(*arguments: object) -> tuple[list[int], int]:
    # `run_on_ranks` freezes objects, but most programs do not.
    gc.unfreeze()
    hook = CountsFrozen()
    train_with(*arguments, hook)  # type: ignore[arg-type]
    return hook.counts, gc.get_freeze_count()


def test_run_freezes_the_objects_that_exist_at_its_first_step(tmp_path: Path) -> None:
    config = build_run(tmp_path / "out", "gpt2", build_plan((1, 1, 1, 1)), steps=3)
    (([first, *later], after),) = run_on_ranks(1, train_counting, config, joins=False)
    # The count may only fall: frozen objects are deleted, and no new ones are frozen.
    assert len(later) == 2
    assert all(100_000 < count <= first for count in later)
    assert after == 0


def freeze_as_program_and_run() -> list[int]:
    gc.freeze()
    counts = [gc.get_freeze_count()]
    new = [[] for _ in range(1000)]  # Freezing again would count these.
    with frozen_objects_released():
        freeze_objects()
        counts.append(gc.get_freeze_count())
    return [*counts, gc.get_freeze_count(), len(new)]


def test_objects_that_the_program_has_frozen_stay_frozen_after_a_run() -> None:
    ((before, during, after, _),) = run_on_ranks(1, freeze_as_program_and_run)
    # A few frozen objects may be deleted meanwhile.
    assert before - 100 < during <= before
    assert before - 100 < after <= before
