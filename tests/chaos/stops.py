"""Let one process fail in many ways; measure who reports it and how long until all have ended.

`python -m tests.chaos.stops [TIMES]` prints a line for each.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtrain.config.plan import PrecisionPlan
from meshtrain.config.run import WatchdogConfig
from meshtrain.config.toml import dump_toml
from meshtrain.runtime.claims import list_claims
from tests.training.runs import Mesh, build_plan, build_run
from tests.training.test_resume import without_torchrun

FAULTS = ("raise", "mistake", "kill", "leave", "sleep", "freeze")
PATIENT = WatchdogConfig()
FAULTY = Path(__file__).with_name("faulty.py")
# With a larger factor, the limit of a busy machine, whose steps take half a second, exceeds 3 s.
QUICK = WatchdogConfig(first_step_seconds=60.0, minimum_seconds=3.0, factor=2.0)
SECONDS = 90.0


@dataclass(frozen=True)
class Outcome:
    """The end of a run with a fault.

    Attributes:
        seconds: from the fault to the end of the last worker that can end by itself.
        error: all of standard error.
        exit_codes: rank -> exit code, as torchrun tells it.
        failure: content of failure.json, if it exists.
        locks: number of lock files that are left.
    """

    seconds: float
    error: str
    exit_codes: dict[int, int]
    failure: dict[str, Any] | None
    locks: int

    def stops(self) -> list[str]:
        """Return the lines with the reason why a rank stops."""
        return [line for line in self.error.splitlines() if re.match(r"rank \d+ stops: ", line)]

    def mistakes(self) -> list[str]:
        """Return the lines with errors of the user."""
        return [line for line in self.error.splitlines() if line.startswith("error:")]


def write_run(directory: Path, mesh: Mesh = (2, 1, 1, 1), **changes: Any) -> Path:
    """Write the file of a run in float32, whose watchdog reports a hang after 3 s."""
    plan = build_plan(mesh).model_copy(update={"precision": PrecisionPlan()})
    changes = {"steps": 12, "watchdog": QUICK, **changes}
    path = directory / "run.toml"
    path.write_text(dump_toml(build_run(directory / "out", "gpt2-dropout", plan, **changes)))
    return path


def torchrun(*arguments: str, processes: int = 2) -> list[str]:
    """Return the command that starts processes on this machine."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)),
        *arguments,
    ]


def children_of(pid: int) -> list[int]:
    """Return the children of a process, oldest first."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    """Return whether a process has not ended; a frozen one cannot end."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZTX"


def strike(directory: Path, fault: str, *, rank: int = 1, and_terminate: int | None = None) -> Outcome:
    """Run with a fault in the third microbatch of step 6, to the end.

    Args:
        directory: holds run.toml.
        fault: of FAULTS.
        rank: that has it.
        and_terminate: a rank that gets SIGTERM then, as torchrun sends it when another one is gone.
    """
    command = torchrun(str(FAULTY), fault, str(rank), "6", "2", "train", str(directory / "run.toml"))
    path = directory / "stderr"
    with path.open("wb") as file:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, env=without_torchrun())
    struck = None
    end = time.monotonic() + SECONDS
    while struck is None and time.monotonic() < end:
        time.sleep(0.02)
        struck = re.search(r"^FAULT \w+ at ([\d.]+)$", path.read_text(), re.M)
    assert struck, path.read_text()
    workers = children_of(process.pid)
    if and_terminate is not None:
        os.kill(workers[and_terminate], signal.SIGTERM)
    others = [worker for number, worker in enumerate(workers) if fault != "freeze" or number != rank]
    while any(map(is_running, others)) and time.monotonic() < end:
        time.sleep(0.02)
    seconds = time.time() - float(struck[1])
    if fault == "freeze":
        process.kill()
        subprocess.run(["kill", "-KILL", *map(str, workers)], stderr=subprocess.DEVNULL)
    process.wait(SECONDS)
    error = path.read_text()
    codes = {int(rank): int(code) for rank, code in re.findall(r"rank +: (\d+) .*\n  exitcode +: (-?\d+)", error)}
    failure = directory / "out" / "failure.json"
    written = json.loads(failure.read_text()) if failure.exists() else None
    return Outcome(seconds, error, codes, written, len(list_claims(directory / "out")))


def main(times: int) -> None:
    """Print a line for each fault and each rank."""
    for fault, watchdog in [*((fault, QUICK) for fault in FAULTS), ("freeze", PATIENT)]:
        for rank in (0, 1):
            outcomes = []
            for _ in range(times):
                with tempfile.TemporaryDirectory() as directory:
                    write_run(Path(directory), watchdog=watchdog)
                    outcomes.append(strike(Path(directory), fault, rank=rank))
            seconds = sorted(outcome.seconds for outcome in outcomes)
            named = sum((outcome.failure or {}).get("rank") == rank for outcome in outcomes)
            span = f"{seconds[0]:.1f} to {seconds[-1]:.1f} s to the end"
            limit = f"with a limit of {watchdog.minimum_seconds:.0f} s"
            print(f"{fault} on rank {rank}, {limit}: {named} of {times} name it; {span}")
            print(*(f"    {line}\n" for line in outcomes[0].stops() + outcomes[0].mistakes()), sep="")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
