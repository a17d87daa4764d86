"""Devices behind one interface, and the one place that chooses one.

A device module knows streams, events, pinned memory, copies and memory info. Nothing above it asks
which device it runs on.
"""

import contextlib
import os
from typing import Protocol

import torch

from vllm_npu_prep.errors import PrepError

DEVICE_ENV_VAR = "NPU_PREP_DEVICE"
DEVICE_CHOICES = ("auto", "npu", "cpu")


class Device(Protocol):
    """What the worker, the runner and the staging ring need of a device."""

    device: torch.device
    name: str  # for people
    computes_on_host: bool  # whether host threads do the model's work

    def record_event(self) -> object:
        """Mark the present end of the current stream's work."""

    def wait_event(self, event: object) -> bool:
        """Wait on the host until `event` has happened; True if that took waiting."""

    def copy_to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy pinned host bytes to the device, in stream order, without waiting."""

    def zeros(self, nbytes: int) -> torch.Tensor:
        """A large zeroed buffer on the device, int8 ``[nbytes]``."""

    def synchronize(self) -> None:
        """Wait for all work of the device."""

    def memory_info(self) -> tuple[int, int]:
        """Free and total memory in bytes."""

    def host_streams(self) -> contextlib.AbstractContextManager[None]:
        """Context in which upstream code may make streams and events."""


def requested_device() -> str:
    """Value of ``NPU_PREP_DEVICE``, lower case.

    Raises
    ------
    PrepError
        If it is none of ``auto``, ``npu``, ``cpu``.
    """
    value = os.environ.get(DEVICE_ENV_VAR, "auto").strip().lower() or "auto"
    if value not in DEVICE_CHOICES:
        raise PrepError(
            f"{DEVICE_ENV_VAR}={value!r} is not a device: use one of {', '.join(DEVICE_CHOICES)}"
        )
    return value


def choose_device_type() -> str:
    """Decide between ``"cpu"`` and ``"npu"`` (DESIGN: device rules).

    ``auto`` takes an NPU if torch_npu sees one and the CPU if torch_npu is absent. torch_npu
    without a visible NPU is an error, never a silent fall to the CPU.

    Raises
    ------
    PrepError
        If the choice can't be had; the message says what to look at.
    """
    choice = requested_device()
    if choice == "cpu":
        return "cpu"
    from vllm_npu_prep.device.probe import probe_npu

    probe = probe_npu()
    if probe.installed and probe.visible:
        raise PrepError(
            "an Ascend NPU is visible, but this version has no NPU kernel family yet: set "
            f"{DEVICE_ENV_VAR}=cpu to run on the CPU fallback"
        )
    if choice == "auto" and not probe.installed:
        return "cpu"
    raise PrepError(
        f"{DEVICE_ENV_VAR}={choice}: {probe.reason}. Install torch_npu (pip install "
        "'vllm_npu_prep[npu]'), check `npu-smi info`, /dev/davinci* and ASCEND_RT_VISIBLE_DEVICES, "
        f"or set {DEVICE_ENV_VAR}=cpu"
    )


def make_device(device_type: str) -> Device:
    """Device object of a type that `choose_device_type` returned."""
    from vllm_npu_prep.device.cpu import CPUDevice

    assert device_type == "cpu", device_type
    return CPUDevice()
