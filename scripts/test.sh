#!/usr/bin/env bash
# Set up (scripts/setup.sh) and run every check that this machine can run:  bash scripts/test.sh
# Arguments go to pytest:  bash scripts/test.sh tests/test_spawn.py -k killed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh test

echo "==> ruff check"
"$PYTHON" -m ruff check .
echo "==> ruff format --check"
"$PYTHON" -m ruff format --check .
echo "==> pytest (CPU and compile rings; GPU rings where there are GPUs)"
# Two processes: most tests compute on one thread. GPU tests take the whole device, one at a time.
workers=2
nvidia-smi -L >/dev/null 2>&1 && workers=0
"$PYTHON" -m pytest -q -n "$workers" --dist loadfile "$@"
