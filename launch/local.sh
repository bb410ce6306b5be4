#!/usr/bin/env bash
# Train on all GPUs of this machine; without any, on as many processes of the CPU as PROCESSES says.
#   ./launch/local.sh RUN [KEY=VALUE ...]
#   PROCESSES=4 ./launch/local.sh launch/runs/quickstart.toml steps=100
# Lost processes are started again. SIGUSR1, SIGTERM or ctrl-C to this one: all save, and the same command goes on.
# Exit codes are those of meshtrain: 0 done, 2 a mistake, 75 asked to stop and saved (come again), 130 after ctrl-C, 3 a process was lost.
set -euo pipefail
(($# > 0)) || { sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
# The run is named from where this is started, the repository is where all else is.
[[ -f $1 ]] && set -- "$(realpath "$1")" "${@:2}"
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
install_meshtrain

processes="${PROCESSES:-$(python -c 'import torch; print(torch.cuda.device_count())')}"
if ((processes == 0)); then
  echo "error: this machine has no GPU; pass the number of processes to start on its CPU, as in PROCESSES=4" >&2
  exit 2
fi
# One thread per process: the processes are the parallelism.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec meshtrain train "$@" --processes "$processes" --max-restarts 3
