#!/usr/bin/env bash
# Go from a fresh clone to a trained GPT-2 on this machine, in a few minutes.
# Arguments override keys of the run, as in
#   ./launch/quickstart.sh steps=400 optimizer.learning_rate=1e-3
# If it is interrupted, start it again: it continues from its last checkpoint.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
install_meshtrain

run=launch/runs/quickstart.toml
out=runs/quickstart
for argument in "$@"; do
  if [[ $argument == run_directory=* ]]; then out="${argument#*=}"; fi
done

gpus="$(python -c 'import torch; print(torch.cuda.device_count())')"
processes=$((gpus == 0 ? 4 : gpus))
arguments=("run_directory=$out")
# The plan of the run file has 2 pipeline stages x 2 tensor ranks; the rest is data parallel. It
# needs a multiple of 4.
if ((gpus > 0)); then
  arguments+=("plan.precision.compute=bfloat16" "global_batch_size=$((gpus % 4 == 0 ? 4 * gpus : 16 * gpus))")
fi
if ((processes % 4 != 0)); then
  arguments+=("plan.mesh.pp=1" "plan.mesh.tp=1")
fi
arguments+=("$@")

# A mistake is reported here, in one line and with exit code 2, before a process starts or a file is
# removed.
if [[ -d $out/huggingface ]]; then
  meshtrain plan "$run" --world-size "$processes" "${arguments[@]}" >/dev/null
  echo "== $out is a finished quickstart: beginning again"
  rm -rf "$out"/{checkpoints,huggingface,metrics.jsonl,plan.toml,run.toml,tensorboard}
else
  meshtrain check "$run" --world-size "$processes" "${arguments[@]}" >/dev/null
fi

step() {
  local word line="=="
  for word in "$@"; do
    if [[ $word =~ [^[:alnum:]_./=-] ]]; then word="'$word'"; fi
    line+=" $word"
  done
  echo "$line"
  "$@"
}

# Each process uses one thread, because the processes already use all cores. Warnings of torch's C++
# code are hidden.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
trap 'echo "== Interrupted. Start it again: it continues from its last checkpoint."; exit 130' INT
step meshtrain train "$run" --processes "$processes" "${arguments[@]}"
step meshtrain export "$out" "$out/huggingface"
step meshtrain generate "$out/huggingface" --prompt "def read_file(path):" --max-new-tokens 60

cat <<NEXT

What to try next
  tensorboard --logdir $out/tensorboard
  meshtrain generate $out/huggingface --prompt "import os" --temperature 0
  meshtrain check $run --world-size 8 global_batch_size=32 run_directory=new
                                                         what each of 8 processes would hold
  meshtrain plan $run --world-size 4 --toml              the resolved plan as a file
  meshtrain train $run --processes 2 run_directory=$out steps=500 plan.mesh.pp=1
                                                         continue from the last step, on another mesh
  Use your own text: data.train='["my/*.jsonl"]'. The docs explain everything else.
The environment: source .venv/bin/activate
NEXT
