#!/usr/bin/env bash
# Train on the nodes of a Slurm job. Submit it once, from the root of the repository, which all
# nodes must see:
#   sbatch --nodes 4 --gpus-per-node 8 --time 12:00:00 launch/slurm.sh RUN [KEY=VALUE ...]
# Options of the sbatch command override those below. PROCESSES=N starts N processes per node, by
# default one per GPU.
#
#SBATCH --job-name=meshtrain
#SBATCH --ntasks-per-node=1
#SBATCH --output=slurm-%j.out
# Continue the log and the job after a preemption, a lost node and `scontrol requeue`.
#SBATCH --open-mode=append
#SBATCH --requeue
# Slurm sends USR1 this number of seconds before the time limit. It must be longer than a step and a
# checkpoint.
#SBATCH --signal=B:USR1@120
#
# time limit    All processes save at the end of their step. The job requeues itself and continues
#               from there.
# preemption    Slurm sends SIGTERM. All processes save if they can within KillWait seconds (30 by
#               default); otherwise the newest checkpoint is used. Slurm requeues the job, as after
#               `scontrol requeue` and a lost node.
# scancel       All processes save, and the job ends. The same sbatch command continues from there.
#
# Exit code of the job: 0 the run is done; 2 a mistake in the run; 1 or 3 a process failed or was
# lost --max-restarts times (see the log, and failure.json in the run directory). A job that must
# continue is requeued before it ends.
set -euo pipefail
source "$SLURM_SUBMIT_DIR/launch/environment.sh"
install_meshtrain
# Without this, a machine that was lost and comes back finds the store of the previous workers, and
# fails.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Each process uses one thread, because the processes already use all cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# A mistake is reported here, in one line and with exit code 2. torchrun would restart the
# processes.
processes="${PROCESSES:-$(python -c 'import torch; print(torch.cuda.device_count())')}"
meshtrain check "$1" --world-size "$((SLURM_NNODES * processes))" "${@:2}" >/dev/null

first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
torchrun=(
  --nnodes "$SLURM_NNODES" --nproc-per-node "$processes" --max-restarts 3
  --rdzv-backend c10d --rdzv-endpoint "$first:$((20000 + SLURM_JOB_ID % 10000))"
  --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
)
# srun forwards SIGUSR1 to every process on every node. It would kill torchrun, and processes that
# are still starting. So all of them inherit a trap that ignores it, until meshtrain catches it.
# With --signals-to-handle torchrun would end after 30 s.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c 'trap "" USR1; exec python -m meshtrain.runtime.launch --rdzv-conf "is_host=$((SLURM_NODEID == 0))" "$@"' \
  torchrun "${torchrun[@]}" -m meshtrain train "$@" &
step=$!

is_time_up=false
trap 'is_time_up=true; kill -USR1 "$step"' USR1
# 138 is 128 + SIGUSR1: the trap has interrupted `wait`.
while code=0; wait "$step" || code=$?; ((code == 138)); do :; done
if $is_time_up && ((code == 0)); then
  # Of an array job, only this task: the number of its last task is that of the whole array.
  job="${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID:-}_$SLURM_ARRAY_TASK_ID}"
  job="${job:-$SLURM_JOB_ID}"
  echo "== Time is up: job $job goes back into the queue"
  scontrol requeue "$job"
fi
exit "$code"
