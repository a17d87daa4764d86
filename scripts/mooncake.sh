#!/usr/bin/env bash
# Put Mooncake's transfer engine for hosts without NPUs, and the network libraries that it needs,
# into a folder of their own: nothing of the system or of the environment changes.
#
#   scripts/mooncake.sh [FOLDER]    # .cache/mooncake unless given
#
# It prints the variables with which a process finds both. Debian's packages are unpacked where the
# system lacks them; with root, "apt-get install libibverbs1 librdmacm1" does the same for all.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
folder=${1:-$root/.cache/mooncake}
pin=$(grep '^mooncake-transfer-engine-non-cuda==' "$root/constraints.txt")

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
finds() { PYTHONPATH=$folder LD_LIBRARY_PATH=$folder/lib "$python" -c 'import mooncake.engine' 2>/dev/null; }
if ! finds; then
  "$python" -m pip install --quiet --no-deps --upgrade --target "$folder" "$pin" >&2
  if ! finds; then
    packages=$(mktemp -d)
    trap 'rm -rf "$packages"' EXIT
    (cd "$packages" && apt-get download libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200) >&2
    for package in "$packages"/*.deb; do dpkg -x "$package" "$packages/files"; done
    mkdir -p "$folder/lib"
    find "$packages/files" -name '*.so.*' -exec cp -P {} "$folder/lib" \;
  fi
  PYTHONPATH=$folder LD_LIBRARY_PATH=$folder/lib "$python" -c 'import mooncake.engine'
fi
echo "PYTHONPATH=$folder"
echo "LD_LIBRARY_PATH=$folder/lib"
