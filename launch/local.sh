#!/usr/bin/env bash
# Train on all GPUs of this machine. Without a GPU, set PROCESSES to the number of processes to
# start on the CPU.
#   ./launch/local.sh RUN [KEY=VALUE ...]
#   PROCESSES=4 ./launch/local.sh launch/runs/quickstart.toml steps=100
# If a process is lost, all are restarted. After SIGUSR1, SIGTERM or ctrl-C to this script, all
# processes save, and the same command continues the run. The exit codes are those of meshtrain: 0
# done, 2 a mistake, 75 asked to stop and saved (start it again), 130 after ctrl-C, 3 a process was
# lost.
set -euo pipefail
(($# > 0)) || { sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
# The path of the run file is relative to the caller's directory, all others to the repository.
[[ -f $1 ]] && set -- "$(realpath "$1")" "${@:2}"
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
install_meshtrain

processes="${PROCESSES:-$(python -c 'import torch; print(torch.cuda.device_count())')}"
if ((processes == 0)); then
  echo "error: this machine has no GPU; pass the number of processes to start on its CPU, as in PROCESSES=4" >&2
  exit 2
fi
# Each process uses one thread, because the processes already use all cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec meshtrain train "$@" --processes "$processes" --max-restarts 3
