#!/usr/bin/env bash
# Run all checks of the project: style, types, layers, documentation, tests.
# The first step that fails ends the script.
#   ./launch/test.sh [--all] [arguments of pytest]
# --all also runs the tests that the quick suite leaves out (tests/suite/full_only.txt).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
install_meshtrain test

step() {
  echo "== $*"
  "$@"
}

reason="$(python -c 'from tests.host_cuda.build import why_not; print(why_not() or "")')"
if [[ -n $reason ]]; then
  echo "== Tests of CUDA code are skipped: $reason"
fi
step ruff check
step ruff format --check
step mypy
step lint-imports
# Hide the advertisement that mkdocs-material prints.
export NO_MKDOCS_2_WARNING=1
# With --quiet, warnings would not be counted.
step python -m mkdocs build --strict
# Many tests wait for processes, so there is one worker more than cores, and at most four. The tests
# of a file stay together, because they share what is slow to set up. Files begin in the order of
# tests/conftest.py.
step pytest --numprocesses "$(($(nproc) < 4 ? $(nproc) + 1 : 4))" --dist loadfile --no-loadscope-reorder "$@"
