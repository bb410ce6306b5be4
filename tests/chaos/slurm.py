"""launch/slurm.sh under a real Slurm: `python -m tests.chaos.slurm`.

Needs root, slurm-wlm and munge. The controller, the daemon of one node and munge run from a
temporary directory, independent of others on the machine. Three jobs train the same run: one
undisturbed, one that is requeued, one that reaches its time limit.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from meshtrain.checkpoint.storage.directory import CHECKPOINTS_NAME
from meshtrain.config.run import CheckpointConfig, RunConfig
from meshtrain.config.toml import dump_toml
from tests.chaos.recording import read_samples
from tests.test_scripts import copy_repository
from tests.training.runs import build_run
from tests.training.test_resume import assert_same_bits, in_float32, without_torchrun

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
STEPS = 150
SECONDS_PER_STEP = 0.7
SECONDS = 400.0
FAILED = ("FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
CONFIGURATION = """
ClusterName=chaos
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SchedulerType=sched/builtin
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus}
PartitionName=all Nodes=ALL Default=YES MaxTime=60
"""


def missing() -> list[str]:
    """Return the names of missing programs and rights."""
    return [name for name in NEEDED if shutil.which(name) is None] + (["root"] if os.getuid() != 0 else [])


def free_port() -> int:
    """Return a port on which no process listens."""
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def call(*command: str) -> str:
    """Run a command of Slurm, and return what it shows."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout.strip()


def slurm_version() -> tuple[int, ...]:
    """Return its year and month."""
    found = re.search(r"(\d+)\.(\d+)", call("slurmd", "-V"))
    assert found
    return int(found[1]), int(found[2])


def wait_until(condition: Callable[[], bool], what: str, seconds: float = SECONDS) -> float:
    """Wait for a condition, and return the seconds."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + seconds, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.2)
    return time.monotonic() - begin


@contextmanager
def cluster(directory: Path) -> Iterator[None]:
    """Run a cluster of one node: this machine."""
    for folder in ("state", "spool"):
        (directory / folder).mkdir(parents=True)
    host, cpus = socket.gethostname().partition(".")[0], len(os.sched_getaffinity(0))
    settings = {"host": host, "cpus": cpus, "controller_port": free_port(), "node_port": free_port()}
    (directory / "slurm.conf").write_text(CONFIGURATION.format(directory=directory, **settings))
    # No accounting is used; before Slurm 23.02 it could not be disabled.
    plugin = "disabled" if slurm_version() >= (23, 2) else "cgroup/v1"
    (directory / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
    (directory / "munge.key").write_bytes(os.urandom(128))
    (directory / "munge.key").chmod(0o600)
    os.environ["SLURM_CONF"] = str(directory / "slurm.conf")
    places = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    with ExitStack() as daemons:

        def start(*command: str) -> None:
            log = daemons.enter_context((directory / f"{command[0]}.out").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            daemons.callback(lambda: (process.terminate(), process.wait(30)))

        start(
            "munged", "--foreground", "--force", *(f"--{name}={directory}/munge.{end}" for name, end in places.items())
        )
        wait_until((directory / "munge.socket").exists, "munged", 20)
        start("slurmctld", "-D")
        start("slurmd", "-D", "-N", host)
        # Any earlier request waits in vain for an answer.
        wait_until(lambda: "Running as primary" in (directory / "slurmctld.log").read_text(), "slurmctld", 20)
        wait_until(lambda: "idle" in call("sinfo", "-h", "-o", "%t"), "the node", 30)
        try:
            yield
        finally:
            with suppress(AssertionError):
                call("scancel", "--user=root")
                wait_until(lambda: not call("squeue", "-h"), "the end of all jobs", 60)


class Job:
    """A job that trains a run.

    Args:
        repository: from where it is submitted.
        config: the run.
        options: of sbatch.
        pause: so many seconds each step takes more.
    """

    def __init__(self, repository: Path, config: RunConfig, *options: str, pause: float = SECONDS_PER_STEP) -> None:
        self.out = Path(config.run_directory)
        self.record = self.out.with_name(f"{self.out.name}-record")
        self.record.mkdir()
        self.log = self.out.with_suffix(".log")
        file = self.out.with_suffix(".toml")
        file.write_text(dump_toml(config))
        exported = f"--export=ALL,PROCESSES=2,RECORD={self.record},PAUSE={pause}"
        command = ["sbatch", "--parsable", f"--output={self.log}", exported, *options, "launch/slurm.sh", str(file)]
        self.number = subprocess.run(
            command, cwd=repository, env=without_torchrun(), check=True, capture_output=True, text=True
        ).stdout.strip()

    def value(self, name: str) -> str:
        """Return a field of the job, as Slurm shows it."""
        found = re.search(rf"\b{name}=(\S+)", call("scontrol", "show", "job", self.number))
        return found[1] if found else ""

    def wait_for(self, text: str, times: int = 1) -> float:
        """Wait until its log contains a text."""

        def is_there() -> bool:
            assert self.value("JobState") not in FAILED, f"{self.value('JobState')}: {self.shown()}"
            return self.shown().count(text) >= times

        return wait_until(is_there, text)

    def shown(self) -> str:
        """Return its log."""
        return self.log.read_text() if self.log.exists() else ""

    def wait(self) -> None:
        """Wait until it has finished, and fail if it failed."""
        wait_until(lambda: self.value("JobState") in ("COMPLETED", *FAILED), "the end of the job")
        assert (self.value("JobState"), self.value("ExitCode")) == ("COMPLETED", "0:0"), self.shown()

    def resumed_steps(self) -> list[str]:
        """Return the steps from which it resumed."""
        return re.findall(r"^Resumed from .*: step (\d+) done$", self.shown(), re.M)


def requeue(job: Job) -> None:
    """Requeue a job that has trained for some time."""
    wait_until((job.out / CHECKPOINTS_NAME / "step-20").exists, "a checkpoint")
    begin = time.monotonic()
    call("scontrol", "requeue", job.number)
    job.wait_for("Stopped by")
    saved = time.monotonic() - begin
    wait_until(lambda: job.value("JobState") == "PENDING", "in the queue again")
    queued = time.monotonic() - begin
    # Slurm would wait two minutes.
    call("scontrol", "update", f"JobId={job.number}", "StartTime=now")
    job.wait_for("Resumed from")
    resumed = time.monotonic() - begin
    print(
        f"scontrol requeue: saved after {saved:.1f} s, in the queue after {queued:.1f} s, resumed after {resumed:.1f} s"
    )


def compare(name: str, whole: RunConfig, config: RunConfig, job: Job, expected: Job) -> None:
    """Compare a disturbed job with the undisturbed one, and print how much is equal."""
    samples, repeated = read_samples(job.record)
    assert samples == read_samples(expected.record)[0]
    assert sorted(samples) == list(range(STEPS))
    assert_same_bits(whole, config)
    counts = f"{len(samples)} of {STEPS} steps have the same samples, losses and norms; {repeated} were done twice"
    print(f"{name}: started {int(job.value('Restarts')) + 1} times, resumed from step {job.resumed_steps()}; {counts}")
    print(*(f"    {line}" for line in re.findall(r"^(?:Stopped by|== Time|Done).*", job.shown(), re.M)), sep="\n")


def main() -> None:
    """Run the three jobs."""
    if lacking := missing():
        print(f"skipped: there is no {', '.join(lacking)}; needs root, and apt-get install slurm-wlm munge")
        return
    # The finally blocks run on SIGTERM, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        repository = directory / "repository"
        copy_repository(repository)
        # `-m meshtrain` in this copy records the samples.
        shutil.copy(Path(__file__).with_name("recording.py"), repository / "meshtrain" / "__main__.py")
        stack.enter_context(cluster(directory / "slurm"))

        def build(name: str) -> RunConfig:
            changes = {"steps": STEPS, "checkpoint": CheckpointConfig(every=10)}
            return build_run(directory / "runs" / name, "gpt2-dropout", in_float32((2, 1, 1, 1)), **changes)

        (directory / "runs").mkdir()
        whole = build("whole")
        alone = Job(repository, whole, pause=0.0)
        alone.wait()
        config = build("requeued")
        job = Job(repository, config)
        requeue(job)
        job.wait()
        compare("requeued", whole, config, job, alone)
        config = build("limited")
        # Slurm checks the limits twice a minute, so the signal may come at once.
        job = Job(repository, config, "--time=2", "--signal=B:USR1@40")
        job.wait_for("== Time is up")
        wait_until(lambda: job.value("JobState") == "PENDING", "in the queue again")
        call("scontrol", "update", f"JobId={job.number}", "StartTime=now", "TimeLimit=10")
        job.wait()
        compare("reached its limit", whole, config, job, alone)


if __name__ == "__main__":
    main()
