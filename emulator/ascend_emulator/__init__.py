"""An emulated Ascend runtime: the unmodified torch_npu on a machine without an NPU.

`ascend-emulator -- COMMAND` runs any command on it (README.md). Inside such a command this package
counts what the device was asked to do, and takes operator references. It needs torch alone; what
runs on it need not know of it.
"""

from ascend_emulator.api import (
    Counts,
    count,
    counters,
    is_active,
    is_on_device,
    register_reference,
)
from ascend_emulator.errors import EmulatorError

__version__ = "0.1.0"

__all__ = [
    "Counts",
    "EmulatorError",
    "count",
    "counters",
    "is_active",
    "is_on_device",
    "register_reference",
]
