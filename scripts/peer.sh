#!/usr/bin/env bash
# An environment with vllm-ascend, unmodified, for the emulated card: make peer.
#
#   scripts/peer.sh DIR
#
# vLLM is built by scripts/install.sh. torch, of which the package index has a CUDA build alone, gets
# stubs for its CUDA libraries, which are not downloaded. Versions: scripts/peer.txt. Running it
# again is quick when nothing has changed. PYTHON is an interpreter of Python 3.11.
set -euo pipefail

[ $# = 1 ] || { echo "peer: give a folder; see the top of $0" >&2; exit 2; }
venv=$(realpath -m "$1")
root=$(cd "$(dirname "$0")/.." && pwd)
pins=$root/scripts/peer.txt
python=${PYTHON:-python3.11}
stamp=$venv/.installed

log() { printf '\033[1mpeer:\033[0m %s\n' "$*"; }
fail() { echo "peer: $*" >&2; exit 1; }
version() { sed -n "s/^$1==//p" "$pins"; }
pip() { "$venv/bin/python" -m pip --quiet "$@"; }

want=$(cat "$0" "$root/scripts/cuda_stubs.py" "$pins" "$root/constraints.txt" "$root/scripts/install.sh" \
  "$root/emulator/pyproject.toml" | sha256sum)
[ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$want" ] || exit 0

[ "$(uname -sm)" = "Linux x86_64" ] ||
  fail "this is $(uname -sm), and vllm-ascend without a card was tried on Linux x86_64 only; use such a machine"
"$python" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
  fail "$python is not Python 3.11 with venv, which vllm-ascend without a card was tried with; install it or set PYTHON=/path/to/python3.11"
for tool in g++ nm readelf; do
  [ -n "$(command -v $tool)" ] || fail "$tool is missing; install g++ and binutils"
done

start=$SECONDS
unset PYTHONPATH PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_DEPS=1 PIP_QUIET=1
rm -rf "$venv"
mkdir -p "$(dirname "$venv")"
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT

log "1/6 environment $venv ($("$python" --version))"
"$python" -m venv "$venv"
# First what may not be there: the rest takes minutes.
log "2/6 wheels of vllm-ascend $(version vllm-ascend) and torch_npu $(version torch_npu)"
pip download --only-binary :all: --dest "$download" "vllm-ascend==$(version vllm-ascend)" \
  "torch_npu==$(version torch_npu)" 2>"$download/log" ||
  fail "no wheel of vllm-ascend $(version vllm-ascend) or torch_npu $(version torch_npu) for this machine; PIP_INDEX_URL or PIP_FIND_LINKS tell pip where they are ($(grep -m 1 ERROR "$download/log" || tail -n 1 "$download/log"))"
log "3/6 what vLLM needs"
own=$(sed -n 's/==.*//p' "$pins" | paste -sd '|')
grep -Ev "^($own)==" "$root/constraints.txt" >"$download/pins.txt"
grep -Ev '^#|^(vllm|vllm-ascend|torch|torchvision|torch_npu|triton)==' "$pins" >>"$download/pins.txt"
pip install --no-compile --requirement "$download/pins.txt"
log "4/6 torch $(version torch), whose CUDA libraries become stubs"
pip install --no-compile "torch==$(version torch)"
"$venv/bin/python" "$root/scripts/cuda_stubs.py" "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
log "5/6 vLLM $(version vllm), built without device kernels"
"$root/scripts/install.sh" --venv "$venv" --python "$python" --constraints "$pins" --steps vllm,torchvision
log "6/6 vllm-ascend, and torch_npu beside the environment"
pip install --no-compile "$download"/vllm_ascend-*.whl "triton==$(version triton)"  # step 5 removes it
# As in install.sh: beside torch, "import torch" would load it and fail for want of Ascend libraries.
pip install --upgrade --target "$venv/npu-emulator" "$download"/torch_npu-*.whl
PYTHONWARNINGS=ignore pip install --no-build-isolation --editable "$root/emulator"
"$venv/bin/ascend-emulator" --quiet -- true || fail "the emulator can't be built, see above"
echo "$want" >"$stamp"
log "done in $((SECONDS - start)) s; to run a command in it: $venv/bin/ascend-emulator -- COMMAND"
