#!/usr/bin/env bash
# Everything that guards the project: style, types, floors, tests. The first step that fails ends it.
#   ./launch/test.sh [arguments of pytest]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
install_meshtrain test

step() {
  echo "== $*"
  "$@"
}

step ruff check
step ruff format --check
step mypy
step lint-imports
step pytest "$@"
