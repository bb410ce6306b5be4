"""Cut off, preempt and kill one of two hosts, and start it again: `python -m tests.chaos.network`.

Needs root and iproute2. Two network namespaces with an address each stand for two hosts, joined by
a veth pair. Both have the same hostname, which resolves to the loopback in both, so neither reaches
the other by name. The first hosts the rendezvous, and so is the one that must not be lost.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshtrain.checkpoint.storage.directory import CHECKPOINTS_NAME
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.config.run import CheckpointConfig, LoggingConfig, RunConfig
from meshtrain.config.toml import dump_toml
from tests.chaos.recording import read_samples
from tests.training.runs import build_plan, build_run, steps_of
from tests.training.test_resume import train_on_ranks, without_torchrun

STEPS = 240
SECONDS_PER_STEP = 0.4
SECONDS = 200.0
PORT = 29500
RENDEZVOUS = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=10"
RECORDING = Path(__file__).with_name("recording.py")


def missing() -> list[str]:
    """Return the names of missing programs and rights."""
    return [name for name in ("ip",) if shutil.which(name) is None] + (["root"] if os.getuid() != 0 else [])


def ip(*arguments: str) -> str:
    """Run a command of iproute2, and return what it shows."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def wait_until(condition: Callable[[], object], what: str) -> float:
    """Wait for a condition, and return the seconds."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + SECONDS, f"{what}: not within {SECONDS:.0f} s"
        time.sleep(0.05)
    return time.monotonic() - begin


class Host:
    """One of the two hosts.

    Args:
        number: 1 or 2.
        run: the file of the run.
    """

    def __init__(self, number: int, run: Path) -> None:
        self.number = number
        self.run = run
        self.address = f"10.177.0.{number}"
        self.name = f"meshtrain-{os.getpid()}-{number}"
        self.link = f"mt{os.getpid() % 10**6}h{number}"
        self.life = 0
        self.agent: subprocess.Popen | None = None

    @property
    def log(self) -> Path:
        """Return the log of the torchrun that was started last."""
        return self.run.with_name(f"host-{self.number}-{self.life}.log")

    def start(self) -> None:
        """Start torchrun."""
        self.life += 1
        command = [
            *("ip", "netns", "exec", self.name, sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "9"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"10.177.0.1:{PORT}", "--rdzv-id", "chaos"),
            *("--rdzv-conf", f"{RENDEZVOUS},is_host={int(self.number == 1)}", "--local-addr", self.address),
            *(str(RECORDING), "train", str(self.run)),
        ]
        own = {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "PAUSE": str(SECONDS_PER_STEP),
            "RECORD": str(self.run.with_name("record")),
        }
        with self.log.open("wb") as file:
            self.agent = subprocess.Popen(command, stdout=file, stderr=file, env={**without_torchrun(), **own})

    def pids(self) -> list[int]:
        """Return all processes of this host."""
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """Kill all processes of this host at once."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        if self.agent is not None:
            self.agent.wait()

    def shown(self) -> str:
        """Return its log."""
        return self.log.read_text()

    def plug(self, state: str) -> None:
        """Set its end of the link `up` or `down`."""
        ip("-n", self.name, "link", "set", self.link, state)


@contextmanager
def network(*hosts: Host) -> Iterator[None]:
    """Create the namespaces of the hosts and a link between them."""
    try:
        for host in hosts:
            ip("netns", "add", host.name)
        first, second = hosts
        ip("link", "add", first.link, "netns", first.name, "type", "veth", "peer", second.link, "netns", second.name)
        for host in hosts:
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.link)
            ip("-n", host.name, "link", "set", "lo", "up")
            host.plug("up")
        yield
    finally:
        for host in hosts:
            host.kill()
            ip("netns", "delete", host.name)


def newest(config: RunConfig) -> int:
    """Return the step of the newest checkpoint."""
    names = [path.name for path in (Path(config.run_directory) / CHECKPOINTS_NAME).glob("step-*")]
    return max((int(name[5:]) for name in names if name[5:].isdigit()), default=0)


def resumed(host: Host) -> list[int]:
    """Return the steps from which the run resumed, as seen by this host's first process."""
    return [int(step) for step in re.findall(r"Resumed from .*: step (\d+) done", host.shown())]


def stops(host: Host) -> list[str]:
    """Return the lines with which its processes stopped."""
    return [line for line in host.shown().splitlines() if re.match(r"rank \d+ stops: ", line)]


def lose(first: Host, second: Host, how: str, config: RunConfig) -> None:
    """Lose the second host, check that the first continues alone, and start the second again."""
    lives, notices_before = len(resumed(first)), {host: len(stops(host)) for host in (first, second)}
    began = time.monotonic()
    if how == "cut":
        second.plug("down")
    elif how == "preempted":
        assert second.agent is not None
        second.agent.send_signal(signal.SIGTERM)
        print(f"host 2 preempted: its torchrun ends with {second.agent.wait(SECONDS)} after {elapsed(began)}")
    else:
        second.kill()
    notices = {"cut": [first, second], "killed": [first], "preempted": []}[how]
    while notices:
        wait_until(lambda: any(len(stops(host)) >= 2 + notices_before[host] for host in notices), "the hosts notice")
        host = next(host for host in notices if len(stops(host)) >= 2 + notices_before[host])
        notices.remove(host)
        print(f"host 2 {how}: host {host.number} has noticed after {elapsed(began)}")
    wait_until(lambda: len(resumed(first)) > lives, "the first host goes on alone")
    print(f"host 2 {how}: host 1 continues alone from step {resumed(first)[-1]} after {elapsed(began)}")
    print(
        *(f"    {line}" for line in [*stops(first)[notices_before[first] :], *(stops(second) if how == "cut" else [])]),
        sep="\n",
    )
    step = newest(config)
    wait_until(lambda: newest(config) > step, "a checkpoint by the first host alone")
    lives, began = len(resumed(first)), time.monotonic()
    second.plug("up")

    def is_back() -> bool:
        # While its link was cut, torchrun has waited or ended, depending on its activity.
        if second.agent is None or second.agent.poll() is not None:
            print("host 2: its torchrun has ended, and is started again")
            second.start()
        return len(resumed(first)) > lives

    wait_until(is_back, "both go on together")
    print(f"host 2 is back: both continue from step {resumed(first)[-1]} after {elapsed(began)}")
    step = newest(config)
    wait_until(lambda: newest(config) > step, "a checkpoint by both")


def elapsed(began: float) -> str:
    """Return the seconds since `began` as text."""
    return f"{time.monotonic() - began:.1f} s"


def main() -> None:
    """Lose a host three times, and compare with an undisturbed run."""
    if lacking := missing():
        print(f"skipped: there is no {', '.join(lacking)}; needs root, and apt-get install iproute2")
        return
    # The finally blocks run on SIGTERM, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "record").mkdir()
        plan = build_plan((1, 1, 1, 1))
        often, seldom = CheckpointConfig(every=10), LoggingConfig(every=100)
        # With a higher one, rounding grows to 1e-2 in so many steps between any two meshes.
        optimizer = OptimizerConfig(learning_rate=1e-3, epsilon=1e-4)
        changes = {"steps": STEPS, "checkpoint": often, "logging": seldom, "optimizer": optimizer}
        whole = build_run(directory / "whole", "gpt2", plan, **changes)
        expected = train_on_ranks(whole)
        follows = plan.model_copy(update={"mesh": MeshPlan(pp=2, dp_shard=-1)})
        config = build_run(directory / "chaos", "gpt2", follows, **changes)
        (directory / "run.toml").write_text(dump_toml(config))
        first, second = (Host(number, directory / "run.toml") for number in (1, 2))
        with network(first, second):
            first.start()
            second.start()
            wait_until(lambda: newest(config) >= 10, "the first checkpoint")
            for how in ("cut", "preempted", "killed"):
                lose(first, second, how, config)
            for host in (first, second):
                assert host.agent is not None
                assert host.agent.wait(SECONDS + STEPS * SECONDS_PER_STEP) == 0, host.shown()
        samples, repeated = read_samples(directory / "record")
        assert sorted(samples) == list(range(STEPS))
        same = sum(samples[step] == expected[step] for step in expected)
        found, undisturbed = steps_of(Path(config.run_directory)), steps_of(Path(whole.run_directory))
        assert [step["step"] for step in found] == list(range(1, STEPS + 1))
        errors = [abs(b["loss"] - a["loss"]) / a["loss"] for a, b in zip(undisturbed, found, strict=True)]
        num_samples = sum(len(ids) for ids, _ in samples.values())
        print(
            f"{same} of {STEPS} steps, {num_samples:,} samples, are those of an undisturbed run; {repeated} steps were "
            f"repeated; the largest difference of a loss is {max(errors):.0e}"
        )
        assert same == STEPS
        assert max(errors) < 1e-9


if __name__ == "__main__":
    main()
