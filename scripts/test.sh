#!/usr/bin/env bash
# Everything that must hold before a change is merged. Options go to pytest: bash scripts/test.sh -k engine --slow
# With --aot first: compile the kernels for accelerators that are not here instead, see aot.sh.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

export HF_HUB_OFFLINE=1 PYRIGHT_PYTHON_IGNORE_WARNINGS=1
if [ "${1:-}" = --aot ]; then
    shift
    exec bash scripts/aot.sh "$@"
fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m pyright
exec "$PYTHON" -m pytest "$@"
