#!/usr/bin/env bash
# Another release of vLLM with this plugin, in an environment of its own, to be tried: make compat.
#
#   scripts/compat.sh VERSION DIR
#
# vLLM is built by scripts/install.sh, as the pinned one is. A supported release gets the torch that
# this project tests it with. For any other one, torch and torchvision are those that the release
# names; everything else stays at the versions of constraints.txt where the release lets it.
# PYTHON is an interpreter of an environment that `make install` made.
set -euo pipefail

[ $# = 2 ] || { echo "compat: give a version and a folder; see the top of $0" >&2; exit 2; }
version=$1
venv=$(realpath -m "$2")
root=$(cd "$(dirname "$0")/.." && pwd)
constraints=$venv.txt
stamp=$venv/.installed

log() { printf '\033[1mcompat:\033[0m %s\n' "$*"; }
fail() { echo "compat: $*" >&2; exit 1; }
source_to() {
  VLLM_VERSION_OVERRIDE=$version VLLM_TARGET_DEVICE=empty "$PYTHON" -m pip download --quiet \
    --no-deps --no-build-isolation --no-binary vllm --dest "$1" "vllm==$version"
}

supported=$(sed -n 's/^SUPPORTED_VLLM = (\(.*\))$/\1/p' "$root/vllm_npu_prep/compat/releases.py" | tr -d '",')
case " $supported " in
  *" $version "*) exec "$root/scripts/install.sh" --venv "$venv" --vllm "$version" ;;
esac

want=$(cat "$0" "$root/scripts/install.sh" "$root/constraints.txt" "$root/setup.py" | sha256sum)
[ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$want" ] || exit 0
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH PYTHONDONTWRITEBYTECODE

available=$("$PYTHON" -m pip index versions --json --no-binary vllm vllm 2>/dev/null |
  "$PYTHON" -c 'import json, sys; print(*json.load(sys.stdin)["versions"])') ||
  fail "no package index answers, so the releases of vLLM are not known"
case " $available " in
  *" $version "*) ;;
  *) fail "the package index has no source of vLLM $version; available: $available" ;;
esac

log "making $venv (some minutes)"
mkdir -p "$(dirname "$venv")"
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
source_to "$download" || fail "setup.py of vLLM $version fails with the torch of .venv"
"$PYTHON" - "$download/vllm-$version.tar.gz" >"$constraints" <<'PYTHON'
import sys
import tarfile
from email import message_from_binary_file

from packaging.requirements import Requirement

path = sys.argv[1]
folder = path.rpartition("/")[2].removesuffix(".tar.gz")
print(f"vllm=={folder.removeprefix('vllm-')}")
with tarfile.open(path) as archive:
    about = message_from_binary_file(archive.extractfile(f"{folder}/PKG-INFO"))
for requirement in map(Requirement, about.get_all("Requires-Dist")):
    if requirement.name in ("torch", "torchvision"):
        print(f"{requirement.name}{requirement.specifier}")
PYTHON
log "$(tr '\n' ' ' <"$constraints")"

install() { "$root/scripts/install.sh" --venv "$venv" --constraints "$constraints" --steps "$1"; }
pip() { "$venv/bin/python" -m pip install --quiet --no-deps "$@"; }
rm -rf "$venv"
install environment
# pip changes of what is installed only what it must. vLLM pins xgrammar itself; pip would complain of
# its triton, which install.sh removes.
grep -Ev '^(vllm|torch|torchvision|torch_npu|xgrammar)==' "$root/constraints.txt" >"$download/pins.txt"
pip --no-compile --requirement "$download/pins.txt"
install torch
PIP_NO_DEPS=1 install vllm,torchvision
# One at a time: a requirement that no index can meet is for the list to name, the others are met.
cd "$root"
"$venv/bin/python" -m tests.compat.requirements | while read -r requirement; do
  "$venv/bin/python" -m pip install --quiet "$requirement" </dev/null >/dev/null 2>&1 ||
    log "$requirement: can't be installed"
done
# Without dependencies: those are the pinned vLLM and its torch.
PYTHONWARNINGS=ignore pip --no-build-isolation --editable "$root"
echo "$want" >"$stamp"
