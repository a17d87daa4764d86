#!/usr/bin/env bash
# Install vLLM (built empty: no device kernels) and this plugin into a virtual environment.
# make install, CI and the container all run this file.
#
#   scripts/install.sh [--venv DIR] [--extras test,npu] [--python PYTHON]
#
# Running it again is quick and safe: it does nothing when nothing has changed.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
venv=$root/.venv
extras=test
python=${PYTHON:-}
while [ $# -gt 0 ]; do
  case $1 in
    --venv) venv=$2; shift 2 ;;
    --extras) extras=$2; shift 2 ;;
    --python) python=$2; shift 2 ;;
    *) echo "install: unknown option $1 (see the top of $0)" >&2; exit 2 ;;
  esac
done

say() { printf '\033[1minstall:\033[0m %s\n' "$*"; }
fail() { echo "install: $*" >&2; exit 1; }

is_supported() {
  "$1" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

if [ -z "$python" ]; then
  for candidate in python3.11 python3.12 python3; do
    if is_supported "$candidate"; then python=$candidate; break; fi
  done
  [ -n "$python" ] || fail "no Python 3.11 or 3.12 with venv found; install one or set PYTHON=/path/to/python"
fi
is_supported "$python" || fail "$python is not Python 3.11 or 3.12 with venv"

stamp=$venv/.installed
want=$( { "$python" --version; echo "$extras"; cat "$0" "$root/constraints.txt" "$root/setup.py"; } | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  exit 0
fi
start=$SECONDS
# Nothing of another environment may leak in, and byte code has to be written.
unset PYTHONPATH PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK=1

version() { sed -n "s/^$1==//p" "$root/constraints.txt"; }
pip_install() { "$venv/bin/python" -m pip install --quiet --constraint "$root/constraints.txt" "$@"; }

say "1/7 environment $venv ($("$python" --version))"
"$python" -m venv "$venv"
rm -f "$stamp"

say "2/7 torch $(version torch) and build tools"
pip_install pip
pip_install "torch==$(version torch)" setuptools setuptools-scm setuptools-rust wheel packaging \
  cmake ninja jinja2

if ls "$venv"/lib/python*/site-packages/torch/lib/libtorch_cuda.so >/dev/null 2>&1; then
  say "    this is a CUDA build: the CPU fallback runs with it, the emulated Ascend runtime does not."
  say "    For that, name an index or a folder with CPU builds in PIP_EXTRA_INDEX_URL or"
  say "    PIP_FIND_LINKS, and run: make clean install"
fi

say "3/7 vLLM $(version vllm), built without device kernels (about a minute)"
# Isolation would fetch several gigabytes of CUDA packages only to build nothing with them.
VLLM_VERSION_OVERRIDE=$(version vllm) VLLM_TARGET_DEVICE=empty \
  pip_install --no-build-isolation --no-binary vllm "vllm==$(version vllm)"
# It drives neither an Ascend NPU nor the CPU, costs start-up time, and would stand in the way of
# triton-ascend, which has the same import name.
"$venv/bin/python" -m pip uninstall --quiet --yes triton

say "4/7 vllm_npu_prep with extras: $extras"
PYTHONWARNINGS=ignore pip_install --no-build-isolation --editable "$root[$extras]"
if "$venv/bin/python" -m pip show --quiet triton 2>/dev/null; then
  "$venv/bin/python" -m pip uninstall --quiet --yes triton
fi

say "5/7 torchvision $(version torchvision), for models that read images and videos"
# Its dependencies would be CUDA packages, and another torch. Where the index has no build for this
# torch, the plugin makes it importable (vllm_npu_prep/compat.py).
pip_install --no-deps "torchvision==$(version torchvision)"

say "6/7 torch_npu $(version torch_npu), beside the environment, for the emulated Ascend runtime"
# Not in site-packages: there, "import torch" would load it and fail for want of Ascend libraries.
pip_install --no-deps --upgrade --target "$venv/npu-emulator" "torch_npu==$(version torch_npu)"

say "7/7 byte code and caches"
"$venv/bin/python" -m compileall -q "$root/vllm_npu_prep"
"$venv/bin/python" - <<'PYTHON'
from vllm_npu_prep.inspect import kept_step
from vllm_npu_prep.prep import batch
kept_step.warm_up(batch.warm_up())
PYTHON
"$venv/bin/python" - <<'PYTHON' >/dev/null 2>&1 || true
# vLLM inspects an architecture once, in a process of its own, and caches what it found.
from vllm.model_executor.models import ModelRegistry
ModelRegistry.models["Qwen3ForCausalLM"].inspect_model_cls()
PYTHON
echo "$want" >"$stamp"
say "done in $((SECONDS - start)) s"
