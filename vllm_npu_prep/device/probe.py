"""Finds out whether torch_npu is installed and sees an NPU."""

import importlib.util
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class NPUProbe:
    """Whether torch_npu is `installed`, and an NPU is `visible` to this process.

    `reason` says in a few words why no NPU can be used; it is empty if one can.
    """

    installed: bool
    visible: bool
    reason: str


def probe_npu() -> NPUProbe:
    """Look for torch_npu, then ask it for devices, without initialising any."""
    if importlib.util.find_spec("torch_npu") is None:
        return NPUProbe(False, False, "torch_npu is not installed")
    if os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "unset").strip() == "":
        return NPUProbe(True, False, "ASCEND_RT_VISIBLE_DEVICES is empty, which hides every NPU")
    try:
        from vllm_npu_prep.device.npu import visible_devices

        count = visible_devices()
    except Exception as error:  # whatever a broken driver or CANN makes torch_npu raise
        return NPUProbe(True, False, f"torch_npu does not load ({error})")
    if not count:
        return NPUProbe(True, False, "torch_npu is installed, but sees no NPU")
    return NPUProbe(True, True, "")
