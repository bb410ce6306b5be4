"""Processes end with the process that started them."""

import os
import signal
import subprocess
import sys
import time

from meshtrain.runtime.lifetime import wait_for_holders

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]])
child.wait()
"""
CHILD = """
import sys, time
from pathlib import Path
from meshtrain.runtime.lifetime import die_with_parent, hold_until_death
die_with_parent()
for _ in range(2):
    hold_until_death(Path(sys.argv[1]))
Path(sys.argv[1] + ".held").touch()
time.sleep(60)
"""
FORKING = """
import os, sys, time
from meshtrain.runtime.lifetime import children_die_with_parent
with children_die_with_parent():
    mortal = os.fork()
    if not mortal:
        time.sleep(60)
other = os.fork()
if not other:
    time.sleep(60)
print(mortal, other, flush=True)
time.sleep(60)
"""


def is_alive(process: int) -> bool:
    with open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def test_killed_parent_ends_its_child_and_releases_its_lock(tmp_path):
    lock = tmp_path / "logs" / "workers.lock"
    wait_for_holders(lock)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(lock)])
    while not (tmp_path / "logs" / "workers.lock.held").exists():
        time.sleep(0.01)
    start = time.monotonic()
    killing = subprocess.Popen(["bash", "-c", f"sleep 0.5; kill -9 {parent.pid}"])
    wait_for_holders(lock)

    assert 0.4 < time.monotonic() - start < 30
    assert (parent.wait(), killing.wait()) == (-signal.SIGKILL, 0)


def test_only_children_forked_in_the_context_die_with_the_parent():
    parent = subprocess.Popen([sys.executable, "-c", FORKING], stdout=subprocess.PIPE, text=True)
    mortal, other = map(int, parent.stdout.readline().split())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    for _ in range(500):
        if not os.path.exists(f"/proc/{mortal}") or not is_alive(mortal):
            break
        time.sleep(0.01)
    else:
        raise AssertionError("it lives")

    assert is_alive(other)
    os.kill(other, signal.SIGKILL)


TORCHRUN = """
import os, subprocess, sys, threading, time
os.environ["TORCHELASTIC_RUN_ID"] = "none"
child = []
thread = threading.Thread(target=lambda: child.append(subprocess.Popen([sys.executable, "-c", sys.argv[1]])))
thread.start()
thread.join()
print(child[0].pid, flush=True)
time.sleep(60)
"""
WORKER = """
import os, time
from meshtrain.runtime.lifetime import at_sudden_exit, end_with_torchrun
at_sudden_exit(lambda: os.write(1, b"last act\\n"))
end_with_torchrun()
os.write(1, b"ready\\n")
time.sleep(60)
"""


def test_worker_ends_with_its_torchrun_and_not_with_the_starting_thread():
    parent = subprocess.Popen(
        [sys.executable, "-c", TORCHRUN, WORKER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    worker, message = sorted(parent.stdout.readline() for _ in range(2))
    assert message == "ready\n"
    time.sleep(1.0)
    assert is_alive(int(worker))
    parent.kill()
    # Standard output is closed when both processes have ended.
    begin = time.monotonic()
    shown, errors = parent.communicate(timeout=60)
    assert time.monotonic() - begin < 10
    assert shown == "last act\n"
    assert errors == f"rank 0 stops: torchrun (process {parent.pid}), which started it, was killed\n"
