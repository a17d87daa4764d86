"""The CPU fallback: the device interface with operations that complete before they return."""

import contextlib
import ctypes
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import psutil
import torch

from vllm_npu_prep.compat.torch import no_op_cuda_streams
from vllm_npu_prep.device.regions import HostRegion

CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
"""Linux files of a process's memory (proc_pid_clear_refs(5), proc_pid_status(5))."""

HUGE_PAGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
"""The bytes of a huge page (Linux, admin-guide/mm/transhuge.rst): 2 MiB on x86-64, 512 MiB on
aarch64 whose kernel has pages of 64 KiB.
"""


def device_name(index: int) -> str:
    return "cpu"


def set_device(device: torch.device) -> None: ...


def total_memory(index: int) -> int:
    return psutil.virtual_memory().total


def visible_devices() -> None: ...  # no limit


def has_collectives() -> bool:
    return True


def installed_version(package: str) -> str:
    return ""


def graph_pool() -> None: ...


class CPUDevice:
    """The host itself as a device; see `vllm_npu_prep.device.Device`."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.name = "CPU fallback"
        self.computes_on_host = True

    def bind_cpus(self) -> str:
        """Do nothing: the host's threads compute on all of its CPUs."""
        return ""

    def allow_captures(self) -> str:
        """Do nothing: graphs are fakes here."""
        return ""

    def record_event(self) -> object:
        """Return None: work on the CPU is complete when it returns."""
        return None

    def wait_event(self, event: object) -> bool:
        del event
        return False

    def copy_to_device(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[int], None]:
        # It runs once per step, when the CPU's caches no longer hold numpy's code: its assignment
        # would take 1.5 times as long
        target_bytes, source_bytes = target.numpy().data, source.numpy().data

        def copy(nbytes: int) -> None:
            target_bytes[:nbytes] = source_bytes[:nbytes]

        return copy

    def native(self, tensor: torch.Tensor) -> np.ndarray:
        """Return the same memory in numpy, whose small operations take a fifth of torch's time."""
        return tensor.numpy()

    def scatter(self, target: np.ndarray, indices: np.ndarray, values: np.ndarray) -> None:
        target[indices] = values

    def gather(self, target: np.ndarray, source: np.ndarray, rows: np.ndarray) -> None:
        target[:] = source[rows]

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Return zeroed pages, which the kernel allocates on first use.

        `torch.zeros` would write them all, which takes seconds at start-up for a KV cache of
        gigabytes.
        """
        return torch.from_numpy(np.zeros(nbytes, np.int8))

    def region(self, nbytes: int) -> HostRegion:
        return HostRegion(nbytes)

    def synchronize(self) -> None: ...  # there is nothing to wait for

    def memory_info(self) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def reset_peak_memory(self) -> None:
        with contextlib.suppress(OSError):
            CLEAR.write_text("5")

    def peak_memory(self) -> int:
        peak, now = _resident()
        return peak - now

    def memory_in_use(self) -> int:
        return _resident()[1]

    def return_free_memory(self) -> None:
        """Have glibc release free memory between allocations, by ``malloc_trim(3)``."""
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)

    def capturing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def host_streams(self) -> contextlib.AbstractContextManager[None]:
        return no_op_cuda_streams()


def huge_page_bytes() -> int:
    """Return the size of a huge page of this host; zero if its kernel has none."""
    try:
        return int(HUGE_PAGE.read_text())
    except (OSError, ValueError):
        return 0


def _resident() -> tuple[int, int]:
    """Return peak and current bytes of resident memory; zeros if the kernel tells neither."""
    try:
        words = STATUS.read_text().split()
    except OSError:
        return 0, 0
    peak, now = (int(words[words.index(name) + 1]) << 10 for name in ("VmHWM:", "VmRSS:"))
    return peak, now


class Done:
    """The end of copies of the CPU fallback; see `vllm_npu_prep.device.Transfer`."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...  # there is nothing to wait for


class CopyStream:
    """The copies of the CPU fallback; see `vllm_npu_prep.device.CopyStream`."""

    def __init__(self, device: torch.device) -> None: ...

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Done:
        for target, source in pairs:
            target.copy_(source)
        return Done()
