"""The CPU fallback: the same interface, where every operation completes before it returns."""

import contextlib

import numpy as np
import psutil
import torch

from vllm_npu_prep import compat


class CPUDevice:
    """The host itself as a device."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.name = "CPU fallback"
        self.computes_on_host = True

    def record_event(self) -> object:
        """Work on the CPU is complete when it returns, so an event needs no state."""
        return None

    def wait_event(self, event: object) -> bool:
        """Never waits."""
        del event
        return False

    def copy_to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy at once."""
        target.copy_(source)

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Pages of zeros that the kernel hands out when they are touched.

        `torch.zeros` writes them all: seconds at start-up for a KV cache of gigabytes.
        """
        return torch.from_numpy(np.zeros(nbytes, np.int8))

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def memory_info(self) -> tuple[int, int]:
        """Free and total memory of the host in bytes."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def reset_peak_memory(self) -> None:
        """The host's allocator keeps no peak."""

    def peak_memory(self) -> int:
        """Unknown: nothing is taken from the free memory for it."""
        return 0

    def host_streams(self) -> contextlib.AbstractContextManager[None]:
        """Streams and events that do nothing, for upstream code that makes some."""
        return compat.inert_cuda_streams()
