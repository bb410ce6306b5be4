#!/usr/bin/env bash
# Train on the nodes of a Slurm job. From the root of the repository, which all nodes must see, and once for the whole run:
#   sbatch --nodes 4 --gpus-per-node 8 --time 12:00:00 launch/slurm.sh RUN [KEY=VALUE ...]
# What sbatch is told on the command line counts, not what stands here. PROCESSES=N: so many per node; else one per GPU.
#
#SBATCH --job-name=meshtrain
#SBATCH --ntasks-per-node=1
#SBATCH --output=slurm-%j.out
# Continue the log and the job after a preemption, a lost node and `scontrol requeue`.
#SBATCH --open-mode=append
#SBATCH --requeue
# So many seconds before the limit this script is told that time is up. It must be longer than a step and a checkpoint.
#SBATCH --signal=B:USR1@120
#
# time limit    all processes save at the end of their step, the job requeues itself and goes on from there
# preemption    Slurm sends SIGTERM: all save, in KillWait seconds (30, if the site says nothing; torchrun grants 30 too),
#               or the newest checkpoint counts; Slurm requeues the job. `scontrol requeue` and a lost node are the same.
# scancel       all save as well, and the job is gone; the same sbatch goes on from there
#
# Exit code of the job: 0 the run is done, 2 a mistake in the run; 1 or 3 a process failed or was lost --max-restarts times: see
# the log, and failure.json in the run directory. What shall come again is requeued before it ends.
set -euo pipefail
source "$SLURM_SUBMIT_DIR/launch/environment.sh"
install_meshtrain
# Without it a machine that was lost and comes back finds the store of the workers before it, and fails.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# One thread per process: the processes are the parallelism.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# A mistake is told here, in one line and with exit code 2; torchrun would start the processes again.
processes="${PROCESSES:-$(python -c 'import torch; print(torch.cuda.device_count())')}"
meshtrain check "$1" --world-size "$((SLURM_NNODES * processes))" "${@:2}" >/dev/null

first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
torchrun=(
  --nnodes "$SLURM_NNODES" --nproc-per-node "$processes" --max-restarts 3
  --rdzv-backend c10d --rdzv-endpoint "$first:$((20000 + SLURM_JOB_ID % 10000))"
  --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
)
# srun hands SIGUSR1 on to every process on every node. torchrun would die of it, and so would a process that has not begun
# yet; both inherit that it is ignored, until meshtrain catches it. With --signals-to-handle torchrun would end after 30 s.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c 'trap "" USR1; exec python -m meshtrain.runtime.launch --rdzv-conf "is_host=$((SLURM_NODEID == 0))" "$@"' \
  torchrun "${torchrun[@]}" -m meshtrain train "$@" &
step=$!

is_time_up=false
trap 'is_time_up=true; kill -USR1 "$step"' USR1
# 128 + SIGUSR1: the trap has interrupted the waiting.
while code=0; wait "$step" || code=$?; ((code == 138)); do :; done
if $is_time_up && ((code == 0)); then
  echo "== Time is up: job $SLURM_JOB_ID goes back into the queue"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
