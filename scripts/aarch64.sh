#!/usr/bin/env bash
# Run Python of an aarch64 environment with this plugin on an x86-64 host: make test-aarch64.
#
#   scripts/aarch64.sh PYTHON_ARGUMENTS...
#
# qemu-user interprets the processor, in a chroot with Debian's arm64 packages; what can run on this
# machine's own processor does: unpacking, byte code, and a cross compiler. All of it lies in
# .cache/aarch64, and mounts end with the command. Needs root, Debian's packages that are named below
# and an environment of Python 3.11, whose pip fetches the packages of constraints.txt for aarch64.
# PYTHON is its interpreter. Running it again goes on where it ended.
set -euo pipefail

project=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$project/.venv/bin/python}
dir=$project/.cache/aarch64
root=$dir/root
venv=$dir/venv
site=$venv/lib/python3.11/site-packages
binfmt=/proc/sys/fs/binfmt_misc

log() { printf '\033[1maarch64:\033[0m %s\n' "$*"; }
fail() { echo "aarch64: $*" >&2; exit 1; }
version() { sed -n "s/^$1==//p" "$project/constraints.txt"; }
pip() { "$python" -m pip --quiet --quiet --disable-pip-version-check "$@"; }

[ "$(uname -sm)" = "Linux x86_64" ] || fail "this is $(uname -sm); run the tests themselves, or use Linux x86_64"
[ "$(id -u)" = 0 ] || fail "run it as root, who may mount and chroot"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
  fail "$python is not Python 3.11, as in Debian bookworm; set PYTHON=/path/to/python3.11"
for tool in qemu-aarch64-static debootstrap aarch64-linux-gnu-g++; do
  [ -n "$(command -v $tool)" ] ||
    fail "$tool is missing; apt-get install qemu-user-static debootstrap g++-aarch64-linux-gnu"
done

step() { # NAME WORDS...: runs step_NAME unless it has been done
  [ -e "$dir/done/$1" ] && return
  log "${*:2}"
  local start=$SECONDS
  "step_$1"
  touch "$dir/done/$1"
  log "    done in $((SECONDS - start)) s"
}

# Configuring the packages would take an hour, and only what is done here by hand is needed of it.
step_debian() {
  rm -rf "$root"
  DEBIAN_FRONTEND=noninteractive debootstrap --arch=arm64 --foreign --variant=minbase \
    --include=python3-venv,python3-dev,libgomp1,binutils,git,procps bookworm "$root" >"$dir/debootstrap.log" ||
    fail "debootstrap can't make the root, see $dir/debootstrap.log"
  local deb
  for deb in "$root"/var/cache/apt/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$deb" | tar --keep-directory-symlink -xpf - -C "$root"
  done
  # In a container it leaves a link to its own, which would be one to itself.
  [ ! -L "$root/proc" ] || { rm "$root/proc"; mkdir "$root/proc"; }
  cp "$root/usr/share/base-passwd/passwd.master" "$root/etc/passwd"
  cp "$root/usr/share/base-passwd/group.master" "$root/etc/group"
}

# torch and oneDNN read which processor it is, and would find this machine's: two of Neoverse N1.
step_processor() {
  local cpus=$root/sys/devices/system/cpu cpu
  rm -f "$dir/cpuinfo"
  for cpu in 0 1; do
    mkdir -p "$cpus/cpu$cpu/regs/identification"
    echo 0x00000000414fd0c1 >"$cpus/cpu$cpu/regs/identification/midr_el1"
    printf '%s\t: %s\n' processor $cpu \
      Features 'fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp' \
      'CPU implementer' 0x41 'CPU architecture' 8 'CPU variant' 0x4 'CPU part' 0xd0c 'CPU revision' 1 >>"$dir/cpuinfo"
    echo >>"$dir/cpuinfo"
  done
  echo 0-1 | tee "$cpus"/{online,possible,present} >/dev/null
}

# Debian's compiler for aarch64 runs on this processor: a minute instead of half an hour.
step_compiler() {
  mkdir -p "$dir/bin"
  ln -sf "$(command -v aarch64-linux-gnu-g++)" "$dir/bin/g++"
  ln -sf "$(command -v aarch64-linux-gnu-nm)" "$dir/bin/nm"
  ln -sf "$(command -v aarch64-linux-gnu-readelf)" "$dir/bin/readelf"
  cat >"$dir/bin/g++-inside" <<SCRIPT
#!/bin/sh
exec chroot /host aarch64-linux-gnu-g++ "\$@" -I$root/usr/include/python3.11 -idirafter $root/usr/include
SCRIPT
  chmod +x "$dir/bin/g++-inside"
}

step_python() {
  inside /sbin/ldconfig
  inside python3 -m venv --without-pip "$venv"
}

platforms=(--platform linux_aarch64 --platform manylinux2014_aarch64)
for glibc in {17..36}; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
foreign=(--no-deps --only-binary=:all: --python-version 3.11 --implementation cp "${platforms[@]}")
step_packages() {
  grep -E '^[A-Za-z]' "$project/constraints.txt" | grep -Ev '^(vllm|torch_npu)==' >"$dir/pins.txt"
  pip install --no-compile "${foreign[@]}" --target "$site" --requirement "$dir/pins.txt"
  pip download "${foreign[@]}" --dest "$dir/wheels" "torch_npu==$(version torch_npu)"
  VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(version vllm) pip download --no-deps \
    --no-build-isolation --no-binary vllm --dest "$dir/wheels" "vllm==$(version vllm)"
}

step_torch() {
  PATH=$dir/bin:$PATH "$python" "$project/scripts/cuda_stubs.py" "$site"
  sed -i -E '/^Requires-Dist: (cuda|nvidia|triton)/d' "$site"/torch-*.dist-info/METADATA
}

step_byte_code() { "$python" -m compileall -q -j 2 "$root/usr/lib/python3.11" "$site" >/dev/null || true; }

step_vllm() { install vllm,torchvision; }
step_plugin() { install plugin; }
step_emulator() { install emulator; }
install() { # STEPS: of scripts/install.sh, with what has been fetched
  inside PIP_NO_INDEX=1 PIP_FIND_LINKS="$dir/wheels" PIP_NO_COMPILE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    "$project/scripts/install.sh" --venv "$venv" --python python3 --steps "$1"
  "$python" -m compileall -q -j 2 "$site" >/dev/null || true
}

# The project and git's folder have the same paths within; the host's own files are in /host.
inside() { # [NAME=VALUE...] COMMAND...
  local git
  git=$(git -C "$project" rev-parse --path-format=absolute --git-common-dir 2>/dev/null || echo "$project")
  [ -e $binfmt/register ] || mount -t binfmt_misc binfmt_misc $binfmt
  [ -e $binfmt/qemu-aarch64 ] || cat /usr/lib/binfmt.d/qemu-aarch64.conf >$binfmt/register
  mkdir -p "$root$project" "$root$git" "$root/host"
  unshare --mount bash -euc '
    root=$1 project=$2 git=$3
    mount --rbind / "$root/host"
    mount --rbind /proc "$root/proc"
    mount --bind "$project/.cache/aarch64/cpuinfo" "$root/proc/cpuinfo"
    mount --rbind /dev "$root/dev"
    mount --bind "$git" "$root$git"
    mount --bind "$project" "$root$project"
    exec chroot "$root" /usr/bin/env --chdir="$project" "${@:4}"
  ' bash "$root" "$project" "$git" -i HOME=/root LANG=C.UTF-8 TMPDIR=/tmp \
    PATH="$venv/bin:/usr/bin:/bin:/usr/sbin:/sbin" XDG_CACHE_HOME="$dir/cache" NUMBA_CACHE_DIR="$dir/cache/numba" \
    CXX="$dir/bin/g++-inside" \
    GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*' \
    QEMU_CPU=neoverse-n1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 "$@"
}

mkdir -p "$dir/done"
step debian "Debian's packages for arm64"
step processor "what says which processor it is"
step compiler "cross compiler"
step python "Python"
step packages "packages of constraints.txt for aarch64"
step torch "torch, whose CUDA libraries become stubs"
step byte_code "byte code"
step vllm "vLLM, by scripts/install.sh"
step plugin "the plugin"
step emulator "the emulated runtime"
[ $# -gt 0 ] || exit 0
# qemu keeps a record of each page that is mapped, so the emulated card gets fewer addresses.
ulimit -v $((170 << 20))
inside PYTHONPATH="$project:$project/emulator" PYTORCH_NPU_ALLOC_CONF=expandable_segments:False \
  NPU_PREP_DEVICE=cpu OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 PYTHONHASHSEED=0 "$venv/bin/python" "$@"
