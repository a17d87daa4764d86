#!/usr/bin/env bash
# Build a wheel and an sdist of the plugin and of the emulated runtime, install the wheels in a new
# environment, and let it serve a tiny model, on the CPU fallback and on the emulated card: make dist.
#
#   scripts/dist.sh DIR VENV MODEL
#
# DIR gets the four files. VENV is made anew. PYTHON is an interpreter of an environment that
# `make install` made. Each wheel is built from its sdist, so what an sdist lacks is noticed.
set -euo pipefail

[ $# = 3 ] || { echo "dist: give a folder, an environment and a model; see the top of $0" >&2; exit 2; }
dist=$(realpath -m "$1") venv=$(realpath -m "$2") model=$(realpath "$3")
root=$(cd "$(dirname "$0")/.." && pwd)
version() { sed -n "s/^$1==//p" "$root/constraints.txt"; }
log() { printf '\033[1mdist:\033[0m %s\n' "$*"; }
# Nothing of the checkout may be found by accident.
unset PYTHONPATH PYTHONDONTWRITEBYTECODE

rm -rf "$dist" "$venv"
for folder in "$root" "$root/emulator"; do
  log "building the sdist and the wheel of $folder"
  "$PYTHON" -W ignore -m build --outdir "$dist" "$folder" >"$dist.log" 2>&1 || { tail -30 "$dist.log" >&2; exit 1; }
  rm -rf "$folder/build" "$folder"/*.egg-info/SOURCES.txt
done
rm -f "$dist.log"

log "an environment with vLLM and these wheels: $venv (some minutes)"
"$root/scripts/install.sh" --venv "$venv" --steps environment,torch,vllm,torchvision
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=$root/constraints.txt
"$venv/bin/python" -m pip install --quiet "$(ls "$dist"/vllm_npu_prep-*.whl)[serve]" "$dist"/ascend_emulator-*.whl
"$venv/bin/python" -m pip uninstall --quiet --yes triton 2>/dev/null || true
"$venv/bin/python" -m pip install --quiet --no-deps --target "$venv/npu-emulator" \
  "torch_npu==$(version torch_npu)"

empty=$(mktemp -d)
trap 'rm -rf "$empty"' EXIT
cd "$empty"
"$venv/bin/python" -P - "$root" <<'PYTHON'
import sys
from pathlib import Path

import ascend_emulator
import vllm_npu_prep

for package in (vllm_npu_prep, ascend_emulator):
    if Path(package.__file__).is_relative_to(Path(sys.argv[1]) / package.__name__):
        sys.exit(f"dist: {package.__name__} came from the checkout: {package.__file__}")
PYTHON
log "vllm serve on the CPU fallback"
NPU_PREP_DEVICE=cpu "$venv/bin/python" "$root/examples/serve.py" --model "$model" --once --port 8137
log "vllm serve on the emulated card"
"$venv/bin/vllm-npu-prep" emulate --quiet -- env NPU_PREP_DEVICE=npu \
  "$venv/bin/python" "$root/examples/serve.py" --model "$model" --once --port 8137
log "done: $(cd "$dist" && echo *)"
