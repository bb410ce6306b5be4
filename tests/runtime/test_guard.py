"""One process fails and all stop with the same message, also with real processes and kills."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType

import pytest
import torch.distributed as dist

from meshtrain.errors import DataError
from meshtrain.runtime.activity import STEPS_TO_JUDGE_BY, Activity, HangLimits
from meshtrain.runtime.failure import (
    ECHOES,
    Failure,
    Report,
    failure_from_json,
    failure_kind,
    is_echo,
    message_of,
)
from meshtrain.runtime.hang import describe, find_hang, hang_failure, innermost_frames, is_waiting
from tests.chaos.stops import FAULTS, PATIENT, QUICK, Outcome, strike, write_run

LIMITS = HangLimits(first_step_seconds=100.0, minimum_seconds=1.0, factor=10.0)


def report(rank: int, *frames: str, waiting: bool = True) -> Report:
    return Report(rank, f"host{rank}", "step 5, forward", frames, waiting)


def test_activity_describes_step_stage_microbatch_and_phase():
    activity = Activity()
    assert activity.described() == "start"
    activity.begin_step(5)
    activity.enter("forward", stage=0, microbatch=2)
    assert activity.described() == "step 5, stage 0, microbatch 2, forward"
    activity.begin("checkpoint")
    assert activity.described() == "step 5, checkpoint"


def test_limit_is_long_at_first_and_follows_the_median():
    activity = Activity()
    for step in range(STEPS_TO_JUDGE_BY):
        activity.begin_step(step)
        assert activity.limit_seconds(LIMITS) == 100.0
        time.sleep(0.2)
        activity.end_step()
    activity.begin_step(STEPS_TO_JUDGE_BY)
    assert 2.0 <= activity.limit_seconds(LIMITS) < 20.0
    assert activity.limit_seconds(HangLimits(100.0, minimum_seconds=50.0, factor=2.0)) == 50.0
    assert activity.seconds_in_part() < 0.2
    activity.excuse(60.0)
    assert activity.seconds_in_part() < -59.0
    activity.begin("evaluation")
    assert activity.limit_seconds(LIMITS) == 100.0


def test_first_cause_is_reported():
    wrapped = RuntimeError("[Stage 1] failed")
    wrapped.__cause__ = ValueError("bad\nvalue")
    assert message_of(wrapped) == "ValueError: bad value"
    assert message_of(KeyError()) == "KeyError"
    assert [failure_kind(error) for error in (DataError("x"), KeyboardInterrupt(), OSError())] == [
        "mistake",
        "interrupted",
        "exception",
    ]


@pytest.mark.parametrize("echo", ECHOES)
def test_echo_of_another_failure_is_not_a_cause(echo):
    assert is_echo(RuntimeError(f"gloo: {echo} [127.0.0.1]:123"))
    assert not is_echo(RuntimeError("out of memory"))


def test_failure_is_written_and_read(tmp_path):
    failure = Failure("hung", 1, "h", "hangs", step=3, reports=(report(0, "a.py:1 in f"), report(1)))
    failure.write(tmp_path / "new")
    assert failure_from_json((tmp_path / "new" / "failure.json").read_text()) == failure
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["failure.json"]


def test_some_of_many_reports_are_shown():
    failure = Failure("hung", 1, "h", "hangs", reports=tuple(report(rank, "a.py:1 in f") for rank in range(18)))
    lines = failure.lines()
    assert lines[0] == "rank 1 on h hangs"
    assert lines[1] == "  rank 0 on host0: step 5, forward, waiting, at a.py:1 in f"
    assert (len(lines), lines[-1]) == (18, "  and 2 more, in failure.json")


def test_rank_that_does_not_wait_is_hung():
    waits, works, silent = report(0, "torch"), report(1, "model", waiting=False), report(2, waiting=False)
    assert find_hang([waits, works, silent]) == [silent]
    assert find_hang([waits, works]) == [works]
    assert find_hang([waits]) == [waits]

    def message(*reports: Report) -> str:
        return hang_failure(list(reports), waits, 31.0, 30.0).message

    over = "it has taken 31.0 s on rank 0, and the limit is 30.0 s"
    assert message(waits, works) == f"hangs in step 5, forward, at model: {over}"
    assert message(waits, silent) == f"hangs in step 5, forward, and does not answer: {over}"
    assert message(waits, works, works) == f"hangs in step 5, forward, at model; so is rank 1 on host1: {over}"
    assert message(waits, waits) == f"and all others wait for each other: {over}"


def test_main_thread_is_inspected_from_another_thread():
    frames = innermost_frames()
    assert describe(frames[1]).endswith("in test_main_thread_is_inspected_from_another_thread")
    assert describe(frames[0]).startswith("meshtrain/runtime/hang.py:")
    assert not is_waiting(frames)


def frame_in(file: str) -> FrameType:
    names: dict[str, FrameType] = {}
    exec(compile("import sys; frame = sys._getframe()", file, "exec"), names)  # noqa: S102 - a frame of that file
    return names["frame"]


def test_writing_files_in_torch_is_not_waiting():
    collective = frame_in("/x/torch/distributed/distributed_c10d.py")
    assert is_waiting([collective])
    assert not is_waiting([collective, frame_in("/x/torch/distributed/checkpoint/filesystem.py")])


def test_main_thread_that_waits_for_a_save_has_the_frames_of_the_save():
    seen, may_end = [], threading.Event()

    def look() -> None:
        time.sleep(0.2)
        seen.extend(describe(frame) for frame in innermost_frames())
        may_end.set()

    saving = threading.Thread(target=may_end.wait, name="checkpoint")
    saving.start()
    threading.Thread(target=look).start()
    saving.join()
    assert any(frame.endswith(" in run") for frame in seen)
    assert not any(" in test_main_thread" in frame for frame in seen)


END_UNHEARD = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from meshtrain.runtime.failure import Failure
from meshtrain.runtime.guard import Guard
from meshtrain.runtime.activity import HangLimits

os.set_blocking(2, False)
try:
    while True:
        os.write(2, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(2, True)
limits = HangLimits(first_step_seconds=9.0, minimum_seconds=9.0, factor=2.0)
guard = Guard(
    dist.HashStore(), 0, 2, directory=Path(sys.argv[1]), limits=limits, hosts_store=False, is_stopping=lambda: False
)
guard._end(Failure("gone", 1, "h", "is gone"))
"""


def test_failing_rank_without_readers_ends(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", END_UNHEARD, str(tmp_path)], stderr=subprocess.PIPE)
    try:
        assert process.wait(60) == 3
    finally:
        process.kill()
        process.stderr.close()


HOST_THE_STORE = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from meshtrain.runtime.failure import Failure, Report
from meshtrain.runtime.guard import Guard
from meshtrain.runtime.activity import HangLimits

store = dist.TCPStore("127.0.0.1", 0, is_master=True)
limits = HangLimits(first_step_seconds=9.0, minimum_seconds=9.0, factor=2.0)
guard = Guard(store, 0, 3, directory=Path(sys.argv[1]), limits=limits, hosts_store=True, is_stopping=lambda: False)
reports = [Report(rank, "h", "step 5", ("a.py",) if rank < 2 else (), rank == 0) for rank in range(3)]
print(store.port, flush=True)
guard._end(Failure(sys.argv[2], 1, "h", "is it", reports=tuple(reports)))
"""


@pytest.mark.parametrize(("kind", "seconds"), [("hung", (1.0, 2.5)), ("exception", (1.0, 2.5)), ("gone", (3.0, 5.0))])
def test_host_of_the_store_waits_for_its_readers(tmp_path, kind, seconds):
    """Of three ranks, the last is silent; the second is the cause, and reads it after 1 s."""
    command = [sys.executable, "-c", HOST_THE_STORE, str(tmp_path), kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    store = dist.TCPStore("127.0.0.1", int(process.stdout.readline()), is_master=False)
    begin = time.monotonic()
    while not store.check(["reported/0"]):
        time.sleep(0.01)
    time.sleep(1.0)
    store.set("reported/1", "")
    assert process.wait(30) == 3
    shortest, longest = seconds
    assert shortest <= time.monotonic() - begin < longest
    process.stdout.close()


STRIKES = {
    **{fault: partial(strike, fault=fault) for fault in FAULTS},
    "freeze for long": partial(strike, fault="freeze"),
    "freeze while stopping": partial(strike, fault="freeze", and_terminate=0),
}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Let rank 1 fail in the ways that the tests of this session ask for, at most four at once."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {"raise", "mistake", "sleep"}.union(*(map(str, item.callspec.params.values()) for item in items))
    names = [name for name in STRIKES if name in asked]
    directories = [tmp_path_factory.mktemp(name.replace(" ", "-")) for name in names]
    for name, directory in zip(names, directories, strict=True):
        write_run(directory, watchdog=QUICK if name in FAULTS else PATIENT)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda name, directory: STRIKES[name](directory), names, directories)
        return dict(zip(names, found, strict=True))


WHERE = "step 6, stage 1, microbatch 2, forward"


@pytest.mark.parametrize(
    ("fault", "who_speaks", "words", "code"),
    [
        ("raise", {0, 1}, f"failed in {WHERE}: ValueError: the fault of the test", 1),
        ("kill", {0}, "is gone, last seen in ", -9),
        ("leave", {0}, "is gone, last seen in ", 7),
        ("sleep", {0, 1}, f"hangs in {WHERE}, at tests/chaos/faulty.py:", 3),
    ],
)
def test_all_ranks_name_the_failed_rank_within_ten_seconds(outcomes, fault, who_speaks, words, code):
    outcome = outcomes[fault]
    assert outcome.seconds < 10.0
    assert {int(line.split()[1]) for line in outcome.stops()} == who_speaks
    assert [line for line in outcome.stops() if not (" stops: rank 1 on " in line and words in line)] == []
    assert outcome.exit_codes == {0: 3, 1: code}
    assert outcome.failure["rank"] == 1
    # Rank 0 held the lock.
    assert outcome.locks == 0


def test_exception_is_recorded_with_its_activity_and_traceback(outcomes):
    outcome = outcomes["raise"]
    found = {name: outcome.failure[name] for name in ("kind", "step", "phase", "stage", "microbatch")}
    assert found == {"kind": "exception", "step": 6, "phase": "forward", "stage": 1, "microbatch": 2}
    assert outcome.failure["trace"].count("ValueError: the fault of the test") == 1
    # Only the rank that failed shows a traceback.
    assert outcome.error.count("ValueError: the fault of the test\n\nThe above exception") == 1


def test_user_error_of_one_rank_is_printed_once(outcomes):
    outcome = outcomes["mistake"]
    assert outcome.seconds < 10.0
    assert outcome.mistakes() == ["error: rank 1: a file of this machine is broken; fix it"]
    assert outcome.stops() == []
    assert outcome.exit_codes == {0: 2, 1: 2}
    assert outcome.locks == 0
    assert outcome.failure["kind"] == "mistake"


def test_hang_is_recorded_with_the_activity_of_all_ranks(outcomes, tmp_path_factory):
    reports = outcomes["sleep"].failure["reports"]
    assert [(each["rank"], each["is_waiting"]) for each in reports] == [(0, True), (1, False)]
    assert reports[1]["frames"][0].endswith("in strike")
    assert "\n  rank 0 on " in outcomes["sleep"].error
    folder = tmp_path_factory.getbasetemp() / "sleep0" / "out" / "flight_recorder"
    assert sorted(path.name for path in folder.iterdir()) == ["rank_0", "rank_1"]
    assert all(path.stat().st_size > 100 for path in folder.iterdir())


@pytest.mark.parametrize(
    ("name", "words", "seconds"),
    [
        ("freeze", ", and does not answer: ", 10.0),
        ("freeze for long", "is gone, last seen in ", 10.0),
        ("freeze while stopping", "is gone, last seen in ", 6.0),
    ],
)
def test_silent_rank_is_named_by_the_others(outcomes, name, words, seconds):
    """Nothing resets the connection, as with NCCL or when a machine loses its power."""
    outcome = outcomes[name]
    (line,) = outcome.stops()
    assert "rank 0 stops: rank 1 on " in line
    assert words in line
    assert outcome.seconds < seconds
    assert outcome.failure["rank"] == 1
