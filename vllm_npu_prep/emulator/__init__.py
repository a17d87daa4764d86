"""An emulated Ascend runtime: the unmodified torch_npu on a machine without an NPU.

`vllm-npu-prep emulate -- COMMAND` runs any command on it (docs/changing/emulator.md). Inside such a
command this package counts what the device was asked to do, and takes operator references. Nothing
in the plugin imports it.
"""

from vllm_npu_prep.emulator.api import (
    Counts,
    count,
    counters,
    is_active,
    is_on_device,
    register_reference,
)

__all__ = [
    "Counts",
    "count",
    "counters",
    "is_active",
    "is_on_device",
    "register_reference",
]
