#!/usr/bin/env bash
# Entry point of the images: says what keeps the plugin from working here before a model loads.
#
#   entrypoint.sh COMMAND [ARGUMENT ...]
#
# NPU_PREP_DOCTOR says what a failure that `vllm-npu-prep doctor` finds does: refuse (unless given)
# ends with exit code 2, show goes on, off doesn't look.
set -eo pipefail

here=$(cd "$(dirname "$0")" && pwd)

# CANN's variables, as the CANN project's own images set them. Its scripts aren't made for -e.
load() {
  local script=$1
  shift
  # shellcheck disable=SC1090
  if [ -r "$script" ]; then . "$script" "$@" || true; fi
}
cann=${NPU_PREP_CANN_ROOT:-/usr/local/Ascend}
load "$cann/ascend-toolkit/set_env.sh"
load "$cann/nnal/atb/set_env.sh" "--cxx_abi=${ATB_CXX_ABI:-1}"
export PATH="$here:$PATH"

case ${NPU_PREP_DOCTOR:=refuse} in
  off) ;;
  refuse | show)
    if ! vllm-npu-prep doctor; then
      if [ "$NPU_PREP_DOCTOR" = refuse ]; then
        echo "entrypoint: not started, because of the failures above; to start anyway, set NPU_PREP_DOCTOR=show" >&2
        exit 2
      fi
      echo "entrypoint: starting despite the failures above (NPU_PREP_DOCTOR=show)" >&2
    fi
    ;;
  *)
    echo "entrypoint: NPU_PREP_DOCTOR=$NPU_PREP_DOCTOR; set it to refuse, show or off" >&2
    exit 2
    ;;
esac

# The health check asks the address that this command names.
printf '%s\n' "$*" >"${TMPDIR:-/tmp}/npu_prep_command"
exec "$@"
