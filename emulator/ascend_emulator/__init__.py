"""An emulated Ascend runtime: the unmodified torch_npu on a machine without an NPU.

`ascend-emulator -- COMMAND` runs any command on it (README.md). Inside such a command this package
counts the device's work, and accepts operator references. It needs torch alone, and the command
need not know about the emulator.
"""

from ascend_emulator.api import (
    Counts,
    count,
    counters,
    fail_kernel,
    hold_streams,
    host_ns,
    is_active,
    is_on_device,
    let_run,
    register_reference,
    touch,
)
from ascend_emulator.errors import EmulatorError

__version__ = "0.2.0"

__all__ = [
    "Counts",
    "EmulatorError",
    "count",
    "counters",
    "fail_kernel",
    "hold_streams",
    "host_ns",
    "is_active",
    "is_on_device",
    "let_run",
    "register_reference",
    "touch",
]
