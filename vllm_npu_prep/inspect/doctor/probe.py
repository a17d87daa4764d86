"""Answers the doctor's questions that need torch and vLLM imported.

It runs as a process of its own: an import may fail, hang or take the process with it. Each answer
is a line of JSON after `MARK`, printed at once, so that earlier findings are kept.
"""

import contextlib
import io
import json
from collections.abc import Callable
from typing import Any

MARK = "npu_prep_probe: "


def ask_torch() -> dict[str, Any]:
    """Import torch, which loads torch_npu, too, if that is installed."""
    import torch

    return {"version": torch.__version__}


def ask_devices() -> dict[str, Any]:
    from vllm_npu_prep.aclnn import FUNCTIONS, missing_functions
    from vllm_npu_prep.device import device_name, total_memory
    from vllm_npu_prep.device.probe import probe_npu

    probe = probe_npu()
    answer: dict[str, Any] = {"visible": probe.visible, "reason": probe.reason}
    if probe.visible:
        answer |= {"device": device_name("npu"), "total_memory": total_memory("npu")}
        answer["missing"] = missing_functions(FUNCTIONS)
    return answer


def ask_kernels() -> dict[str, Any]:
    """Return the kernel family and the form of masks, with default options."""
    from vllm_npu_prep.attention.families import KERNEL_FAMILIES
    from vllm_npu_prep.config import PrepConfig, decide
    from vllm_npu_prep.device import choose_device

    # The forms that default families take serve steps of any size
    decided = decide(PrepConfig(), choose_device().device_type, KERNEL_FAMILIES, 1, 1)
    return {"family": decided.attention, "mask": decided.mask_form}


def ask_platform() -> dict[str, Any]:
    from vllm.platforms import builtin_platform_plugins, current_platform

    kind = type(current_platform)
    own = []
    for name, detect in builtin_platform_plugins.items():
        with contextlib.suppress(Exception):
            if detect() is not None:
                own.append(name)
    return {"platform": f"{kind.__module__}.{kind.__qualname__}", "built_in": own}


QUESTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": ask_torch,
    "devices": ask_devices,
    "kernels": ask_kernels,
    "platform": ask_platform,
}


def main() -> None:
    """Ask every question, even after one has failed."""
    for name, ask in QUESTIONS.items():
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):  # refusals of the plugin end the process
                answer = ask()
        except BaseException as error:
            text = said.getvalue().strip().splitlines() if isinstance(error, SystemExit) else []
            lines = text or str(error).strip().splitlines() or [""]
            kind = "" if text else f"{type(error).__name__}: "
            answer = {"error": kind + (lines[-1] if text else lines[0])}
        print(f"\n{MARK}{json.dumps({'name': name, **answer})}", flush=True)


if __name__ == "__main__":
    main()
