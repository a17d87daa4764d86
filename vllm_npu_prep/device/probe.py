"""Is torch_npu installed, and does it see an NPU? Asked without initialising a device."""

import glob
import importlib.util
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class NPUProbe:
    """What was found.

    Attributes
    ----------
    installed
        torch_npu can be found.
    visible
        The host offers at least one NPU that this process may use.
    reason
        In a few words, why no NPU can be used; empty if one can.
    """

    installed: bool
    visible: bool
    reason: str


def probe_npu() -> NPUProbe:
    """Look for torch_npu and for device nodes.

    Nothing is imported: the platform is chosen in the parent process, and a runtime initialised
    there would not survive the fork of the workers.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return NPUProbe(False, False, "torch_npu is not installed")
    if os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "unset").strip() == "":
        return NPUProbe(True, False, "ASCEND_RT_VISIBLE_DEVICES is empty, which hides every NPU")
    if not glob.glob("/dev/davinci[0-9]*"):
        return NPUProbe(True, False, "torch_npu is installed, but there is no /dev/davinci* node")
    return NPUProbe(True, True, "")
