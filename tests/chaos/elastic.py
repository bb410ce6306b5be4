"""Lose one of two machines and continue with the other: `python -m tests.chaos.elastic [TIMES]`.

Two torchrun agents on this machine stand for two machines. The losses are compared with those of an
undisturbed run.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from meshtrain.checkpoint.storage.directory import CHECKPOINTS_NAME
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.run import CheckpointConfig
from meshtrain.config.toml import dump_toml
from tests.chaos.stops import children_of
from tests.training.runs import build_plan, build_run, steps_of
from tests.training.test_resume import train_on_ranks, wait_for, without_torchrun

STEPS = 60
RENDEZVOUS = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2"


def agent(port: int, run: Path, log: Path, share: str) -> subprocess.Popen:
    """Start torchrun as on one machine of one to two."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "elastic"),
        *("--rdzv-conf", RENDEZVOUS, "--max-restarts", "3", "-m", "meshtrain", "train", str(run)),
    ]
    environment = {**without_torchrun(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": share}
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)


def is_open(port: int) -> bool:
    """Return whether a process listens on this port."""
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def lose_a_machine(directory: Path, *, share: str = "1") -> float:
    """Kill the second agent and its worker; return the seconds to a step of the other alone."""
    plan = build_plan((1, 1, 2, 1))
    changes = {"steps": STEPS, "checkpoint": CheckpointConfig(every=10)}
    whole = build_run(directory / "whole", "gpt2", plan, **changes)
    train_on_ranks(whole)
    elastic = build_run(
        directory / "elastic", "gpt2", plan.model_copy(update={"mesh": MeshPlan(dp_shard=-1)}), **changes
    )
    (directory / "run.toml").write_text(dump_toml(elastic))
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    out = Path(elastic.run_directory)
    first = agent(port, directory / "run.toml", directory / "first.log", share)
    # The first agent must host the rendezvous: torchrun cannot lose the machine that does.
    while not is_open(port):
        time.sleep(0.1)
    second = agent(port, directory / "run.toml", directory / "second.log", share)
    wait_for(out / CHECKPOINTS_NAME / "step-10", process=first)
    workers = children_of(second.pid)
    killed = time.monotonic()
    for pid in (second.pid, *workers):
        os.kill(pid, signal.SIGKILL)
    second.wait()
    log = directory / "first.log"
    while log.read_text().count("Resumed from") == 0 and first.poll() is None:
        time.sleep(0.05)
    seconds = time.monotonic() - killed
    assert first.wait(200) == 0, log.read_text()
    shown = log.read_text()
    assert "1 data-parallel" in shown, shown
    expected, found = (steps_of(directory / name) for name in ("whole", "elastic"))
    assert [step["step"] for step in found] == list(range(1, STEPS + 1))
    errors = [abs(b["loss"] - a["loss"]) / a["loss"] for a, b in zip(expected, found, strict=True)]
    print(f"resumed after {seconds:.1f} s; the largest difference of a loss is {max(errors):.0e}")
    print(*[line for line in shown.splitlines() if " stops: " in line or "Resumed" in line], sep="\n")
    assert max(errors) < 1e-9
    return seconds


def main(times: int) -> None:
    """Lose machines, with the store that torchrun keeps over a restart and without."""
    for share in ("1", "0"):
        for _ in range(times):
            with tempfile.TemporaryDirectory() as directory:
                print(f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE={share}")
                lose_a_machine(Path(directory), share=share)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
