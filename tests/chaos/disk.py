"""Fill the disk in the middle of a save, with a small tmpfs and a real run.

python -m tests.chaos.disk [--times 5]

Needs the right to mount (root). The run saves at every step into a tmpfs with space for a few
checkpoints only; another file takes more and more of it. The run must end with exit code 2 and a
line that names the disk. The newest checkpoint must be complete and load: the same command resumes
once there is space.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshtrain.checkpoint.storage.directory import list_checkpoints
from meshtrain.checkpoint.storage.integrity import find_damage
from meshtrain.config.run import CheckpointConfig
from meshtrain.config.toml import dump_toml
from tests.training.runs import build_plan, build_run, steps_of
from tests.training.test_resume import without_torchrun

MEGABYTE = 2**20


@contextmanager
def small_disk(directory: Path, megabytes: int) -> Iterator[Path]:
    """Mount a tmpfs of a size."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def may_mount() -> bool:
    """Return whether this user may mount here."""
    with tempfile.TemporaryDirectory() as directory:
        command = ["mount", "-t", "tmpfs", "tmpfs", directory]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
            return False
        subprocess.run(["umount", directory], check=True)
        return True


def fill_and_resume(directory: Path, *, taken: int, in_background: bool) -> str:
    """Run into a full disk, make space and resume; return the error line."""
    with small_disk(directory / "disk", 8) as disk:
        changes = {"steps": 8, "checkpoint": CheckpointConfig(every=1, keep=50, in_background=in_background)}
        config = build_run(directory / "run", "gpt2", build_plan((1, 1, 1, 1)), **changes)
        config = config.model_copy(update={"run_directory": str(disk / "run")})
        (directory / "run.toml").write_text(dump_toml(config))
        (disk / "other").write_bytes(bytes(taken))
        command = [sys.executable, "-m", "meshtrain", "train", str(directory / "run.toml")]
        first = subprocess.run(command, capture_output=True, text=True, env=without_torchrun())
        newest = list_checkpoints(disk / "run" / "checkpoints")[0]
        whole = not find_damage(newest)
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        again = subprocess.run(command, capture_output=True, text=True, env=without_torchrun())
        (line, *more) = first.stderr.splitlines()
        assert first.returncode == 2, first
        assert "No space left on device" in line, line
        assert not more, more
        assert whole, newest
        assert again.returncode == 0, again.stderr
        assert f"Resumed from {newest}" in again.stdout, again.stdout
        assert [step["step"] for step in steps_of(disk / "run")] == list(range(1, 9))
        return line


def main() -> None:
    """Print the result of each full disk."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    if not may_mount():
        print("skipped: needs root and the right to mount")
        return
    for number in range(options.times):
        with tempfile.TemporaryDirectory() as directory:
            taken, in_background = number * MEGABYTE // 2, number % 2 == 1
            print(fill_and_resume(Path(directory), taken=taken, in_background=in_background), flush=True)
    print(
        f"{options.times} of {options.times} full disks: named, the newest checkpoint complete, the run resumed from it"
    )


if __name__ == "__main__":
    main()
