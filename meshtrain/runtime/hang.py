"""Find which process hangs: of processes that wait for each other, the one that does not wait."""

import linecache
import sys
import threading
from collections.abc import Iterable
from pathlib import PurePath
from types import FrameType

from meshtrain.runtime.failure import Failure, Report

FRAMES_KEPT = 8
SAVING_THREAD = "checkpoint"
"""Name of the thread that writes a checkpoint while training continues."""
# A wait consists of its own function, one or two wrappers, and its caller.
FRAMES_OF_A_WAIT = 3
WAITING_FILES = ("torch/distributed/", "torch/cuda/")
# Processes in these files are writing a checkpoint, so they do not wait for others.
WORKING_FILES = ("torch/distributed/checkpoint/filesystem.py", "meshtrain/checkpoint/storage/location.py")
# Calls in which a process with a GPU waits for the work it has queued.
WAITING_CALLS = (".item()", ".synchronize()", ".tolist()", ".wait()")


def innermost_frames() -> list[FrameType]:
    """Return the functions that the main thread is in, innermost first.

    If the main thread waits for the thread that saves a checkpoint, those of that thread are
    returned.
    """
    main = threading.main_thread()
    saving = next((thread for thread in threading.enumerate() if thread.name == SAVING_THREAD), None)
    # While training continues beside a save, the save does not delay the others.
    thread = saving if saving is not None and _joins(main) else main
    frame = sys._current_frames().get(thread.ident or 0)
    frames: list[FrameType] = []
    while frame is not None and len(frames) < FRAMES_KEPT:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _joins(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code is threading.Thread.join.__code__:
            return True
        frame = frame.f_back
    return False


def describe(frame: FrameType) -> str:
    """Return `file.py:12 in function`, with enough of the path to identify the file."""
    path = PurePath(frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-3:])}:{frame.f_lineno} in {frame.f_code.co_name}"


def is_waiting(frames: list[FrameType]) -> bool:
    """Return whether a main thread seems to wait for other processes.

    It is judged by its innermost functions and its current line.
    """
    if any(name in frame.f_code.co_filename for frame in frames for name in WORKING_FILES):
        return False
    if any(name in frame.f_code.co_filename for frame in frames[:FRAMES_OF_A_WAIT] for name in WAITING_FILES):
        return True
    line = linecache.getline(frames[0].f_code.co_filename, frames[0].f_lineno) if frames else ""
    return any(call in line for call in WAITING_CALLS)


def find_hang(reports: Iterable[Report]) -> list[Report]:
    """Return the reports of the processes that keep the others waiting.

    These are the processes that do not answer; else those that do not wait for others; else all.
    """
    known = list(reports)
    silent = [report for report in known if not report.frames]
    return silent or [report for report in known if not report.is_waiting] or known


def hang_failure(reports: list[Report], asker: Report, seconds: float, limit: float) -> Failure:
    """Return the failure that names the process that hangs.

    Args:
        reports: of all processes.
        asker: report of the process that exceeded its limit.
        seconds: how long its current part has lasted.
        limit: how long that part may last.
    """
    found = find_hang(reports)
    first, others = found[0], [f"rank {report.rank} on {report.host}" for report in found[1:]]
    over = f"it has taken {seconds:.1f} s on rank {asker.rank}, and the limit is {limit:.1f} s"
    if len(found) == len(reports) > 1:
        message = f"and all others wait for each other: {over}"
    else:
        where = f"at {first.frames[0]}" if first.frames else "and does not answer"
        also = f"; so {'is' if len(others) == 1 else 'are'} {', '.join(others)}" if others else ""
        message = f"hangs in {first.activity}, {where}{also}: {over}"
    return Failure("hung", first.rank, first.host, message, activity=first.activity, reports=tuple(reports))
