"""Kill random ranks of a 4-rank run at random moments, and compare with an undisturbed run.

python -m tests.chaos.kills [--kills 100] [--seed 0]

torchrun restarts the ranks (`--max-restarts`); each time they resume from the newest checkpoint.
Every other kill waits for a save to begin and strikes in the middle of it; half of the runs save in
the background. In the end the weights, AdamW's moments and the metrics of every step must equal,
bit for bit, those of the run that was never killed.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from meshtrain.config.plan import PrecisionPlan
from meshtrain.config.run import CheckpointConfig, RunConfig
from meshtrain.config.toml import dump_toml
from tests.training.runs import build_plan, build_run, read_checkpoint, steps_of
from tests.training.test_resume import COMPARED, without_torchrun

RANKS, STEPS = 4, 40
SECONDS_PER_KILL = 120.0


@dataclass
class Killer:
    """Kills ranks at random.

    Attributes:
        stream: of the choices.
        struck: moment -> number of kills.
    """

    stream: random.Random
    struck: Counter[str] = field(default_factory=Counter)

    def strike(self, torchrun: subprocess.Popen, checkpoints: Path, *, in_save: bool) -> bool:
        """Kill one rank; whether there was still one to kill."""
        before = set(checkpoints.glob("step-*.tmp"))
        delay = self.stream.uniform(0.0, 15.0)
        begin = time.perf_counter()
        while torchrun.poll() is None and time.perf_counter() - begin < SECONDS_PER_KILL:
            if in_save and set(checkpoints.glob("step-*.tmp")) - before:
                time.sleep(self.stream.uniform(0.0, 0.02))
                break
            if not in_save and time.perf_counter() - begin > delay:
                break
            time.sleep(0.0005)
        while torchrun.poll() is None and not (ranks := children_of(torchrun.pid)):
            time.sleep(0.01)
        if torchrun.poll() is not None:
            return False
        saving = bool(set(checkpoints.glob("step-*.tmp")) - before)
        os.kill(self.stream.choice(ranks), signal.SIGKILL)
        self.struck["in a save" if saving else "elsewhere"] += 1
        return True


def children_of(process: int) -> list[int]:
    """Return the processes that a process has started."""
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except FileNotFoundError:
        return []


def build(directory: Path, name: str, *, in_background: bool) -> RunConfig:
    """Return a run with dropout that saves every other step."""
    plan = build_plan((2, 1, 1, 2)).model_copy(update={"precision": PrecisionPlan()})
    saving = CheckpointConfig(every=2, keep=2, in_background=in_background)
    return build_run(directory / name, "gpt2-dropout", plan, steps=STEPS, checkpoint=saving)


def start(config: RunConfig, log: Path) -> subprocess.Popen:
    """Start a run under torchrun."""
    file = Path(config.run_directory).with_suffix(".toml")
    file.write_text(dump_toml(config))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*torchrun, "--max-restarts", "1000", "-m", "meshtrain", "train", str(file)]
    environment = {**without_torchrun(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)


def same(whole: RunConfig, killed: RunConfig) -> bool:
    """Return whether two runs ended with the same bits and metrics."""
    values = [
        [{name: step[name] for name in COMPARED} for step in steps_of(Path(run.run_directory))]
        for run in (whole, killed)
    ]
    expected, found = (read_checkpoint(Path(run.run_directory)) for run in (whole, killed))
    bits = expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    return bits and values[0] == values[1]


def kill_until_done(directory: Path, number: int, killer: Killer, kills: int) -> tuple[int, bool]:
    """Run with as many kills as fit; return their number, and whether the run succeeded."""
    killed = build(directory, f"killed-{number}", in_background=number % 2 == 1)
    log = directory / f"killed-{number}.log"
    process, done = start(killed, log), 0
    checkpoints = Path(killed.run_directory) / "checkpoints"
    while done < kills and killer.strike(process, checkpoints, in_save=done % 2 == 1):
        done += 1
    code = process.wait(timeout=600)
    if code != 0:
        print(log.read_text()[-4000:])
    return done, code == 0 and same(directory_run(directory), killed)


def directory_run(directory: Path) -> RunConfig:
    """Return the run that was never killed."""
    return build(directory, "whole", in_background=False)


def main() -> None:
    """Print a line for each run, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--per-run", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    killer, left, number, whole = Killer(random.Random(options.seed)), options.kills, 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        assert start(directory_run(directory), directory / "whole.log").wait(timeout=600) == 0
        while left > 0:
            done, is_same = kill_until_done(directory, number, killer, min(left, options.per_run))
            left, number, whole = left - done, number + 1, whole + is_same
            print(f"run {number}: {done} kills, {'the same bits' if is_same else 'DIFFERENT'}", flush=True)
    print(
        f"{options.kills} kills ({dict(killer.struck)}) in {number} runs; {whole} of {number} ended with the same bits"
    )


if __name__ == "__main__":
    main()
