#!/usr/bin/env bash
# Train on all GPUs of this machine; without any, on as many processes of the CPU as PROCESSES says.
#   ./launch/local.sh RUN [KEY=VALUE ...]
#   PROCESSES=4 ./launch/local.sh launch/runs/quickstart.toml steps=100
# Lost processes are started again. SIGUSR1 to a process, SIGTERM or ctrl-C to this one: all save, and the same command goes on.
# Exit codes: 0 done, or stopped by SIGUSR1 or stop_after; 2 a mistake, before anything is started; 1 all else, torchrun's own.
set -euo pipefail
(($# > 0)) || { sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
# The run is named from where this is started, the repository is where all else is.
[[ -f $1 ]] && set -- "$(realpath "$1")" "${@:2}"
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
install_meshtrain

processes="${PROCESSES:-$(python -c 'import torch; print(torch.cuda.device_count())')}"
if ((processes == 0)); then
  echo "error: this machine has no GPU; say how many processes shall train on its CPU, as in PROCESSES=4" >&2
  exit 2
fi
# A mistake is told in one line, with exit code 2; torchrun would start the processes again, and end with 1.
meshtrain check "$1" --world-size "$processes" "${@:2}" >/dev/null
# One thread per process: the processes are the parallelism.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# `pkill -USR1 -f "meshtrain train"` reaches the processes; torchrun would die of it.
trap "" USR1
exec torchrun --standalone --nproc-per-node "$processes" --max-restarts 3 -m meshtrain train "$@"
