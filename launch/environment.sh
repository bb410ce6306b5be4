# shellcheck shell=bash
# Sourced by the scripts beside it: goes to the repository root; install_meshtrain makes .venv there, once.

# So many seconds torchrun waits, asked to end, for the processes to save; it would be 30. What a queue grants may be less.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

# install_meshtrain [EXTRA]: install what is pinned; again only when pyproject.toml or constraints.txt has changed.
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
  # torch first and alone: by far the largest, and the one of which a site may have put a build of its own in place.
  python -m pip install -c constraints.txt torch
  # Without build isolation the build backend is pinned too, whatever pip's version.
  python -m pip install -c constraints.txt hatchling editables
  python -m pip install -c constraints.txt --no-build-isolation -e "$requirement"
  echo "$wanted" >"$stamp"
}
