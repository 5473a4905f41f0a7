#!/usr/bin/env bash
# Set up (scripts/setup.sh) and run the main job:  bash scripts/demo.sh [arguments of moe-ep demo]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh hf

echo "==> moe-ep demo $*"
"$PYTHON" -m moe_ep.launch.cli demo "$@"
