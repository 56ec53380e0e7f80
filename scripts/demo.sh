#!/usr/bin/env bash
# Two dozen prompts through eight slots: the answers, and what continuous batching gains over static batching.
# Options are passed on, for example: bash scripts/demo.sh --slots 16 --json figures.json
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

exec "$PYTHON" -m scripts.generate --slots 8 --compare static "$@"
