"""Copies a few numbers from the device to the host without waiting for later work."""

import numpy as np
import torch

from vllm_npu_prep.device import Device


class ReadBack:
    """Copies an int32 array to the host after the work issued so far; `read` waits for it.

    Between `start` and `read` the host can issue more work, for which `read` doesn't wait. Arrays
    have up to `length` entries; `started` counts the copies.
    """

    def __init__(self, device: Device, length: int, pin_memory: bool = False) -> None:
        self.device = device
        with torch.inference_mode(False):
            self._host = torch.zeros(length, dtype=torch.int32, pin_memory=pin_memory)
        self._host_np = self._host.numpy()
        self._event: object = None
        self._size = 0
        self.started = 0

    def start(self, values: torch.Tensor) -> None:
        """Issue the copy of int32 ``[size]`` on the device."""
        self._size = values.shape[0]
        self._host[: self._size].copy_(values, non_blocking=True)
        self._event = self.device.record_event()
        self.started += 1

    def read(self) -> np.ndarray:
        """Return the values of the last `start`, a new int32 ``[size]`` array."""
        if self._event is not None:
            self.device.wait_event(self._event)
            self._event = None
        return self._host_np[: self._size].copy()
