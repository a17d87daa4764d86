#!/usr/bin/env bash
# Runs tests of vllm-ascend on emulated cards, with the Python code of a checkout of it.
#
#   examples/vllm_ascend_ci/run.sh VLLM_ASCEND TEST ... [-- OPTION ...]
#
# VLLM_ASCEND is a checkout near the release in scripts/peer.txt, whose wheel has the compiled
# libraries; it is only read. TEST is a file in it, or a test of a file. OPTIONs are those of
# ascend-emulator: --devices 2, --delay skewed, --allow-hazard PATTERN, ...
set -euo pipefail

[ $# -ge 2 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
root=$(cd "$(dirname "$0")/../.." && pwd)
[ -d "$1/vllm_ascend" ] || { echo "run.sh: $1 is not a checkout of vllm-ascend" >&2; exit 2; }
checkout=$(cd "$1" && pwd)
shift
tests=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  [ -e "$checkout/${1%%::*}" ] || { echo "run.sh: $checkout has no ${1%%::*}" >&2; exit 2; }
  tests+=("$checkout/$1")
  shift
done
[ $# -eq 0 ] || shift

make --no-print-directory -C "$root" peer
bin=$root/.cache/vllm-ascend/bin
overlay=$(mktemp -d)
trap 'rm -rf "$overlay"' EXIT
cp -r "$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm_ascend" "$overlay"
(cd "$checkout" && find vllm_ascend -name '*.py' -print0 | tar c --null -T -) | tar x -C "$overlay"
cd "$overlay"
# Their configuration and conftest.py ask for cards, and prepending would import the checkout itself.
PYTHONPATH=$overlay "$bin/ascend-emulator" "$@" -- \
  pytest -q --import-mode importlib --noconftest -c /dev/null --rootdir "$checkout" -p no:cacheprovider "${tests[@]}"
