"""The script of a Slurm array job with a task for each run of a sweep."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from meshtrain.config.reading import shown_path
from meshtrain.tuning.sweep.runs import SweepRun

SCRIPT = """\
#!/usr/bin/env bash
# The runs of a sweep, one in each task of an array job. Submit it from the root of the repository:
#   sbatch --nodes 1 --gpus-per-node 8 --time 12:00:00 {script}
# Options of the sbatch command override those below. launch/slurm.sh trains a run, and says what
# happens at the time limit and after a preemption. To train at most 4 runs at a time, add
# --array={array}%4.
#
#SBATCH --job-name=meshtrain-sweep
#SBATCH --array={array}
#SBATCH --ntasks-per-node=1
#SBATCH --output=slurm-%A_%a.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
set -euo pipefail
runs=(
{runs}
)
{processes}exec bash "$SLURM_SUBMIT_DIR/launch/slurm.sh" "${{runs[SLURM_ARRAY_TASK_ID]}}"
"""


def array_script(runs: Sequence[SweepRun], processes: int | None, script: Path) -> str:
    """Return the script.

    Args:
        runs: to train, at least one.
        processes: number of processes on each node; None: one for each GPU.
        script: where it is written.
    """
    return SCRIPT.format(
        script=shlex.quote(shown_path(script)),
        array=f"0-{len(runs) - 1}",
        runs="\n".join(f"  {shlex.quote(str(run.file))}" for run in runs),
        processes="" if processes is None else f"export PROCESSES={processes}\n",
    )
