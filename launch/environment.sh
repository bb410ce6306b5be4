# shellcheck shell=bash
# The other scripts source this file. It changes to the repository root and defines
# install_meshtrain.

# Seconds that torchrun waits for its processes to save after SIGTERM. Its default is 30. A queue
# may allow less time.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

# install_meshtrain [EXTRA]: install the pinned packages into .venv, if pyproject.toml or
# constraints.txt has changed.
install_meshtrain() {
  local extra="${1:-}" stamp=".venv/installed-${1:-base}" wanted
  wanted="$(cat pyproject.toml constraints.txt | sha256sum)"
  if [[ ! -x .venv/bin/pip ]]; then
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
      echo "error: meshtrain needs Python 3.11 or newer, python3 is $(python3 --version)" >&2
      exit 2
    }
    echo "== python3 -m venv .venv"
    python3 -m venv .venv
  fi
  export PATH="$PWD/.venv/bin:$PATH"
  if [[ -f $stamp && "$(<"$stamp")" == "$wanted" ]]; then
    return
  fi
  local requirement=".${extra:+[$extra]}"
  echo "== installing $requirement into .venv, as constraints.txt pins it"
  # torch is installed first and alone: it is by far the largest package, and a site may have
  # installed its own build.
  python -m pip install -c constraints.txt torch
  # Without build isolation, the build backend is pinned too, with any version of pip.
  python -m pip install -c constraints.txt hatchling editables
  python -m pip install -c constraints.txt --no-build-isolation -e "$requirement"
  echo "$wanted" >"$stamp"
}
