#!/usr/bin/env bash
# Install vLLM (built empty: no device kernels), this plugin and the emulated Ascend runtime into a
# virtual environment.
# make install, CI and the container all run this file.
#
#   scripts/install.sh [--venv DIR] [--extras test,demo,npu] [--python PYTHON]
#                      [--no-editable] [--steps environment,torch,...] [--constraints FILE]
#                      [--vllm VERSION]
#
# Running it again is quick and safe: it does nothing when nothing has changed. With --steps it does
# these, whatever was done before: a layer of an image holds one or some of them. --vllm installs
# another supported release of vLLM than that of the constraints, beside the same torch.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
venv=$root/.venv
extras="test,demo"
python=${PYTHON:-}
constraints=$root/constraints.txt
editable=--editable
vllm=
all_steps=environment,torch,vllm,torchvision,plugin,emulator,caches
steps=$all_steps
while [ $# -gt 0 ]; do
  case $1 in
    --venv) venv=$2; shift 2 ;;
    --extras) extras=$2; shift 2 ;;
    --python) python=$2; shift 2 ;;
    --no-editable) editable=; shift ;;
    --steps) steps=$2; shift 2 ;;
    --constraints) constraints=$2; shift 2 ;;
    --vllm) vllm=$2; shift 2 ;;
    *) echo "install: unknown option $1 (see the top of $0)" >&2; exit 2 ;;
  esac
done

log() { printf '\033[1minstall:\033[0m %s\n' "$*"; }
heading() { log "$number/$num_steps $*"; }
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

if [ -n "$vllm" ] && [ "$vllm" != "$(sed -n 's/^vllm==//p' "$constraints")" ]; then
  supported=$(sed -n 's/^SUPPORTED_VLLM = (\(.*\))$/\1/p' "$root/vllm_npu_prep/compat/releases.py" | tr -d '",')
  case " $supported " in
    *" $vllm "*) ;;
    *) fail "vLLM $vllm is not supported; supported: $supported (to try another: make compat VLLM=$vllm)" ;;
  esac
else
  vllm=
fi

version() { sed -n "s/^$1==//p" "$constraints"; }
pip() { "$venv/bin/python" -m pip "$@"; }
pip_install() { pip install --quiet --constraint "$constraints" "$@"; }
# -P: what is installed, not what lies in the folder this is run from. No NPU may be needed here.
run() { TORCH_DEVICE_BACKEND_AUTOLOAD=0 NPU_PREP_DEVICE=cpu "$venv/bin/python" -P "$@"; }

remove() {
  local name
  for name in "$@"; do
    ! pip show --quiet "$name" 2>/dev/null || pip uninstall --quiet --yes "$name"
  done
}

step_environment() {
  heading "environment $venv ($("$python" --version))"
  "$python" -m venv "$venv"
  pip_install pip
}

step_torch() {
  heading "torch $(version torch) and build tools"
  pip_install "torch==$(version torch)" setuptools setuptools-scm setuptools-rust wheel packaging \
    cmake ninja jinja2
  if ls "$venv"/lib/python*/site-packages/torch/lib/libtorch_cuda.so >/dev/null 2>&1; then
    log "    this is a CUDA build: the CPU fallback runs with it, the emulated Ascend runtime does not."
    log "    For that, and for NPUs, name an index or a folder with CPU builds for $(uname -m) in"
    log "    PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS, and run: make clean install"
  fi
}

# The constraints are those of the pinned release. Another one gets all of them as they are, then
# what it asks for besides, as far as the index has it.
step_other_vllm() {
  heading "vLLM $vllm, built without device kernels (about a minute)"
  log "    with torch $(version torch), which this project tests; vLLM $vllm pins another"
  local pins
  pins=$(mktemp)
  grep -Ev '^(vllm|torch|torchvision|torch_npu)==' "$constraints" >"$pins"
  pip install --quiet --no-deps --requirement "$pins"
  rm -f "$pins"
  VLLM_VERSION_OVERRIDE=$vllm VLLM_TARGET_DEVICE=empty \
    pip install --quiet --no-deps --no-build-isolation --no-binary vllm "vllm==$vllm"
  (cd "$root" && run -c 'import sys; sys.path.insert(0, "."); from tests.compat.requirements import unmet; print(*unmet(), sep="\n")') |
    while read -r requirement; do
      [ -z "$requirement" ] || pip install --quiet "$requirement" </dev/null >/dev/null 2>&1 ||
        log "    $requirement can't be installed; what is there stays"
    done
  remove triton
}

step_vllm() {
  [ -z "$vllm" ] || { step_other_vllm; return; }
  heading "vLLM $(version vllm), built without device kernels (about a minute)"
  # Isolation would fetch several gigabytes of CUDA packages only to build nothing with them.
  VLLM_VERSION_OVERRIDE=$(version vllm) VLLM_TARGET_DEVICE=empty \
    pip_install --no-build-isolation --no-binary vllm "vllm==$(version vllm)"
  # It drives neither an Ascend NPU nor the CPU, costs start-up time, and would stand in the way of
  # triton-ascend, which has the same import name.
  remove triton
}

step_torchvision() {
  heading "torchvision $(version torchvision), for models that read images and videos"
  # Its dependencies would be CUDA packages, and another torch.
  pip_install --no-deps "torchvision==$(version torchvision)"
  local site hook
  site=$(run -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  hook=$site/_npu_prep_torchvision_import
  rm -f "$hook.py" "$hook.pth"
  # Where the index has no build for this torch, its library does not load, and importing it fails,
  # so importing a model from transformers does, too. A hook mends that; a build that fits has none.
  run -c 'import torchvision' 2>/dev/null && return
  cp "$root/vllm_npu_prep/torchvision_import.py" "$hook.py"
  echo 'import _npu_prep_torchvision_import as hook; hook.install()' >"$hook.pth"
  run -c 'import torchvision' || fail "torchvision can't be imported, see above"
  log "    this build is for another torch: importing it works, operators like nms do not"
}

step_plugin() {
  heading "vllm_npu_prep${extras:+ with extras: $extras}"
  # Another vLLM than the pinned one has all pins already, and asks for some that no index has.
  PYTHONWARNINGS=ignore pip_install --no-build-isolation ${vllm:+--no-deps} $editable \
    "$root[serve${extras:+,$extras}]"
  remove triton
  # numba compares times of files to the last digit, and layers of an image keep whole seconds.
  [ "$editable" ] || run - <<'PYTHON'
import os, pathlib, time
import vllm_npu_prep
now = int(time.time())
for path in pathlib.Path(vllm_npu_prep.__file__).parent.rglob("*.py"):
    os.utime(path, (now, now))
PYTHON
}

step_emulator() {
  heading "ascend_emulator, with torch_npu $(version torch_npu) beside the environment"
  PYTHONWARNINGS=ignore pip_install --no-build-isolation $editable "$root/emulator"
  # Not in site-packages: there, "import torch" would load it and fail for want of Ascend libraries.
  pip_install --no-deps --upgrade --target "$venv/npu-emulator" "torch_npu==$(version torch_npu)"
  # Where it can't be built (no compiler, a CUDA build of torch), its command says why when it is used.
  log "    building its libraries (under a minute)"
  "$venv/bin/ascend-emulator" --quiet -- true >/dev/null 2>&1 || log "    not built; to see why, run: ascend-emulator -- true"
}

step_caches() {
  heading "byte code and caches"
  local package
  package=$(run -c 'import vllm_npu_prep; print(*vllm_npu_prep.__path__)')
  run -m compileall -q "$package"
  run - <<'PYTHON'
import torch
from vllm_npu_prep.attention import kernels
from vllm_npu_prep.observe import step_snapshot
from vllm_npu_prep.prep import batch
step_snapshot.warm_up(batch.warm_up())
kernels.warm_up("compiled", torch.bfloat16)  # the dtype of most models
PYTHON
  run - <<'PYTHON' >/dev/null 2>&1 || true
# vLLM inspects an architecture once, in a process of its own, and caches what it found.
from vllm.model_executor.models import ModelRegistry
ModelRegistry.models["Qwen3ForCausalLM"].inspect_model_cls()
PYTHON
}

# Not among all: whoever changes the code needs these, whoever serves does not.
step_trim() {
  heading "without build tools"
  remove cmake ninja setuptools-rust setuptools-scm wheel
}

for step in ${steps//,/ }; do
  case ,$all_steps,trim, in
    *,"$step",*) ;;
    *) fail "unknown step $step; steps are $all_steps,trim" ;;
  esac
done

stamp=$venv/.installed
want=
if [ "$steps" = "$all_steps" ]; then
  want=$( { "$python" --version; echo "$extras$editable$vllm"; cat "$0" "$constraints" "$root/setup.py" \
    "$root/emulator/pyproject.toml" "$root/vllm_npu_prep/torchvision_import.py"; } | sha256sum)
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
    exit 0
  fi
fi
start=$SECONDS
# Nothing of another environment may leak in, and byte code has to be written.
unset PYTHONPATH PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK=1

rm -f "$stamp"
num_steps=$(wc -w <<<"${steps//,/ }")
number=0
for step in ${steps//,/ }; do
  number=$((number + 1))
  "step_$step"
done
[ -z "$want" ] || echo "$want" >"$stamp"
log "done in $((SECONDS - start)) s"
