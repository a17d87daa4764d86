"""Whether vLLM uses this plugin's platform, or another package's that is installed beside it.

vLLM's plugins are asked in every environment that has them, so nothing here may need a certain
release of vLLM.
"""

import os
from importlib.metadata import entry_points

PLATFORM_CLASS = "vllm_npu_prep.platform.NPUPlatform"
NAME = "npu_prep"
"""The name of this plugin's entry point."""


def is_ours() -> bool:
    """Return whether vLLM has chosen this plugin's platform for this process."""
    from vllm.platforms import current_platform

    kind = type(current_platform)
    return f"{kind.__module__}.{kind.__qualname__}" == PLATFORM_CLASS


def leaves_to_another() -> bool:
    """Return whether another package has a platform here, and nobody asked for this one.

    vLLM accepts one of them. A platform that ``VLLM_PLUGINS`` leaves out is none.
    """
    if os.environ.get("NPU_PREP_DEVICE", "").strip().lower() not in ("", "auto"):
        return False
    names = {entry.name for entry in entry_points(group="vllm.platform_plugins")} - {NAME}
    if (chosen := os.environ.get("VLLM_PLUGINS")) is not None:
        names &= set(chosen.split(","))
    return bool(names)
