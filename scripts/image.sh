#!/usr/bin/env bash
# What an image needs beside an environment of Python; the Dockerfile runs these as root.
#
#   scripts/image.sh soc SOC                  # check the build argument
#   scripts/image.sh remove-build-tools       # compilers and the like that the base image brings
#   scripts/image.sh user NAME UID GID        # who serves, and may open devices of that group
#   scripts/image.sh give NAME FOLDER         # what that user may write
set -euo pipefail

fail() { echo "image: $*" >&2; exit 1; }

soc() {
  case $1 in
    910b | a3) ;;
    310p)
      echo "image: SOC=310p: this version of the plugin refuses Ascend 310P at start-up. The image serves" >&2
      echo "image: with NPU_PREP_DEVICE=cpu only, and has explain, replay and doctor." >&2
      ;;
    *) fail "SOC=$1; it is 910b (A2), a3 or 310p, as in the tags of CANN's images" ;;
  esac
}

build_tools="gcc g++ cc c++ cpp gfortran clang make gmake cmake ninja ld as git"

# Names of the packages that own a build tool. Libraries that these use stay.
packages_of_tools() {
  local tool file
  for tool in $build_tools; do
    file=$(command -v "$tool") || continue
    file=$(readlink -f "$file")
    "$@" "$file" 2>/dev/null || echo "image: $file belongs to no package, and is kept" >&2
  done
}

owner_of_deb() { dpkg -S "$1" | cut -d: -f1; }
owner_of_rpm() { rpm -qf --qf '%{NAME}\n' "$1"; }

remove_build_tools() {
  local found
  if command -v apt-get >/dev/null; then
    found=$(packages_of_tools owner_of_deb | sort -u)
    # shellcheck disable=SC2086
    [ -z "$found" ] || DEBIAN_FRONTEND=noninteractive apt-get purge --yes --quiet $found
  elif command -v rpm >/dev/null; then
    found=$(packages_of_tools owner_of_rpm | sort -u)
    # --nodeps: what else asks for a compiler was made to build, and what CANN loads has to stay.
    # shellcheck disable=SC2086
    [ -z "$found" ] || rpm --erase --nodeps $found
  else
    fail "the base image has neither apt-get nor rpm, so its compilers can't be found and removed"
  fi
}

user() {
  # The base image may have that number already.
  getent group "$1" >/dev/null || groupadd --non-unique --gid "$3" "$1"
  id "$1" >/dev/null 2>&1 ||
    useradd --non-unique --uid "$2" --gid "$3" --create-home --shell /bin/bash "$1"
  [ "$(id -u "$1") $(id -g "$1")" = "$2 $3" ] ||
    fail "$1 is $(id "$1") in the base image; build with these numbers, or another base image"
}

give() {
  mkdir -p "$2"
  chown -R "$1:" "$2"
}

[ $# -gt 0 ] || fail "no step given; the top of $0 lists them"
step=$1
shift
case $step,$# in
  soc,1 | user,3 | give,2) "$step" "$@" ;;
  remove-build-tools,0) remove_build_tools ;;
  *) fail "no step "$step" with $# arguments; the top of $0 lists the steps" ;;
esac
