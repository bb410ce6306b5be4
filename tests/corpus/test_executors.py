"""Passes run on this machine, and on Slurm as far as a fake of its commands can show."""

import os
import sys
from pathlib import Path

import pytest
from datatrove.data import Document

from meshtrain.config.corpus import CorpusConfig, ShuffleConfig, SlurmConfig
from meshtrain.corpus.steps import executors
from meshtrain.corpus.steps.blocks import ShardPass
from meshtrain.corpus.steps.executors import run_pass, total_counts
from meshtrain.corpus.steps.shards import list_shards
from meshtrain.corpus.steps.step import CountShards
from meshtrain.errors import UserError
from tests.corpus.preparations import write_shard

# A fake Slurm: sbatch runs the tasks of the array one after another, in the background.
SBATCH = """#!/usr/bin/env bash
script="${@: -1}"
tasks=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
grep -E '^#SBATCH' "$script" >> "$FAKE/asked"
if [ -z "$LOSES" ] && ! grep -q merge_stats "$script"; then
  cp "$script" "$FAKE/script"
  (for task in $(seq 0 $tasks); do
    SLURM_ARRAY_TASK_ID=$task SLURM_JOB_ID=7 SLURM_NODELIST=here RUN_OFFSET=0 bash "$FAKE/script"
  done; rm "$FAKE/running") > "$FAKE/log" 2>&1 &
  touch "$FAKE/running"
fi
echo "Submitted batch job 7"
"""
SRUN = '#!/usr/bin/env bash\nwhile [ "$1" != launch_pickled_pipeline ]; do shift; done\nexec "$@"\n'
SQUEUE = '#!/usr/bin/env bash\nif [ -e "$FAKE/running" ]; then echo "7 batch running"; fi\n'
SCONTROL = "#!/usr/bin/env bash\necho localhost\n"


def config(tmp_path: Path, **settings: object) -> CorpusConfig:
    return CorpusConfig(directory=str(tmp_path), sources=["any"], shuffle=ShuffleConfig(), workers=1, **settings)


@pytest.fixture
def counting(tmp_path):
    """Return a pass of two tasks that counts three documents in two shards."""
    write_shard(tmp_path / "in", "00000", "gzip", [Document(text="one", id="1"), Document(text="two", id="2")])
    write_shard(tmp_path / "in", "00001", "gzip", [Document(text="three", id="3")])
    return ShardPass("count", [CountShards([("", path) for path in list_shards(tmp_path / "in")])], 2)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    commands = {"sbatch": SBATCH, "srun": SRUN, "squeue": SQUEUE, "scontrol": SCONTROL}
    (tmp_path / "bin").mkdir()
    for name, script in commands.items():
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.setattr(executors, "QUEUE_POLL_SECONDS", 0.1)
    return SlurmConfig(time="01:00:00", partition="cpus", mem_per_cpu_gb=3, sbatch_args={"account": "me"})


def test_the_local_executor_runs_a_pass(tmp_path, counting, capfd):
    run_pass(counting, tmp_path / "logs", config(tmp_path), "counting")

    assert total_counts(tmp_path / "logs") == {"kept: ": 3, "bytes": 74}
    shown = capfd.readouterr()
    assert (shown.out.splitlines()[-1], shown.err) == ("counting  2/2 shards", "")
    assert "Processing done" in (tmp_path / "logs" / "logs" / "task_00001.log").read_text()


def test_slurm_runs_the_same_pass(tmp_path, counting, slurm, capfd):
    run_pass(counting, tmp_path / "logs", config(tmp_path, executor="slurm", slurm=slurm), "counting")

    assert total_counts(tmp_path / "logs") == {"kept: ": 3, "bytes": 74}, (tmp_path / "log").read_text()
    asked = (tmp_path / "asked").read_text().splitlines()
    assert {"#SBATCH --partition=cpus", "#SBATCH --mem-per-cpu=3G", "#SBATCH --array=0-1%1"} < set(asked)
    assert {"#SBATCH --account=me", "#SBATCH --job-name=meshtrain-count"} < set(asked)
    assert capfd.readouterr().err == ""


def test_a_task_that_slurm_lost_is_an_error(tmp_path, counting, slurm, monkeypatch):
    monkeypatch.setenv("LOSES", "yes")
    with pytest.raises(UserError) as caught:
        run_pass(counting, tmp_path / "logs", config(tmp_path, executor="slurm", slurm=slurm), "counting")

    assert str(caught.value) == (
        f"counting: 2 of 2 tasks did not end, the first is 0; see {tmp_path}/logs, then run the same command again; "
        "finished tasks are not repeated"
    )


def test_missing_slurm_or_ray_is_an_error(tmp_path, counting, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    slurm = SlurmConfig(time="01:00:00", partition="cpus")
    with pytest.raises(UserError) as caught:
        run_pass(counting, tmp_path / "logs", config(tmp_path, executor="slurm", slurm=slurm), "counting")
    assert str(caught.value) == (
        'executor = "slurm" needs the command sbatch, which is not on this machine; run it where jobs are submitted'
    )
    monkeypatch.setattr(executors, "find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        run_pass(counting, tmp_path / "logs", config(tmp_path, executor="ray"), "counting")
    assert str(caught.value) == (
        'executor = "ray" needs a package that is not installed; run pip install "ray[default]"'
    )
