"""The interface of devices, and the only place that chooses a device.

A device module handles streams, events, pinned memory, copies and memory info. Code that uses it
doesn't ask which device it runs on.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import psutil
import torch

from vllm_npu_prep.device.regions import Region
from vllm_npu_prep.errors import PrepError

DEVICE_ENV_VAR = "NPU_PREP_DEVICE"
DEVICE_CHOICES = ("auto", "npu", "cpu")
BLOCKING_ENV_VAR = "ASCEND_LAUNCH_BLOCKING"
ALLOCATOR_ENV_VAR = "PYTORCH_NPU_ALLOC_CONF"
PINNED_THRESHOLD = "pinned_max_round_threshold_mb"
"""A setting of `ALLOCATOR_ENV_VAR`: pinned memory of more MiB than this is not rounded up."""


@dataclass(frozen=True)
class DeviceKind:
    """What vLLM's platform has to know about a type of device."""

    device_type: str
    label: str
    dispatch_key: str
    dist_backend: str
    visible_env_var: str  # lists the devices that a process may use
    pin_memory: bool
    dtypes: tuple[torch.dtype, ...]  # supported ones; ``--dtype auto`` falls back to the first
    # How many streams captured graphs may hold together; None for no limit. Ascend devices have
    # 2048, of which vllm-project/vllm-ascend leaves 248 to everything else (1168, 3869, 9564)
    graph_streams: int | None = None


CPU_KIND = DeviceKind(
    device_type="cpu",
    label="CPU fallback",
    dispatch_key="CPU",
    dist_backend="gloo",
    visible_env_var="NPU_PREP_NO_SUCH_DEVICES",  # any number of ranks share the host
    pin_memory=False,
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
)
NPU_KIND = DeviceKind(
    device_type="npu",
    label="Ascend NPU",
    dispatch_key="PrivateUse1",
    dist_backend="hccl",
    visible_env_var="ASCEND_RT_VISIBLE_DEVICES",
    pin_memory=True,
    dtypes=(torch.bfloat16, torch.float16),
    graph_streams=1800,
)


class Transfer(Protocol):
    """Copies that were issued together: the event at their end."""

    def query(self) -> bool:
        """Return whether all have ended, without waiting."""

    def synchronize(self) -> None:
        """Wait on the host until all have ended."""


class CopyStream(Protocol):
    """A stream of copies, in order, beside the stream that computes; no step waits for them."""

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
        """Issue copies ``target, source`` that begin after all work issued so far.

        Host tensors come from `host_memory`. Work that is issued later doesn't wait for the copies:
        a user of a target has to ask the transfer first.
        """


class Memory(Protocol):
    """Allocates large buffers: a device, or the memory pool of sleep mode."""

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Allocate a large zeroed buffer on the device, int8 ``[nbytes]``."""


class Device(Memory, Protocol):
    """What the worker, the runner and the staging ring need of a device."""

    device: torch.device
    name: str  # in messages
    computes_on_host: bool  # whether host threads do the model's work

    def bind_cpus(self) -> str:
        """Run this process on CPUs near the device.

        The returned text says on which; it is empty if nothing has changed.
        """

    def allow_captures(self) -> str:
        """Undo settings of the environment with which no graph can be captured.

        The returned text says what was changed; it is empty if nothing was.
        """

    def record_event(self) -> object:
        """Return an event at the current end of the current stream's work."""

    def wait_event(self, event: object) -> bool:
        """Wait on the host until `event` has happened; return False if it had happened before."""

    def copy_to_device(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[int], None]:
        """Return a function that copies a number of leading bytes of `source` to `target`.

        It copies in stream order, without waiting. Both are uint8 of the same size; `source` is
        pinned.
        """

    def native(self, tensor: torch.Tensor) -> Any:
        """Return the form that is sliced and scattered fastest: a tensor, or numpy on the host."""

    def scatter(self, target: Any, indices: Any, values: Any) -> None:
        """Do ``target[indices] = values`` in one launch; all are native and have one dimension.

        `indices` are int64, and `values` have the dtype of `target`.
        """

    def gather(self, target: Any, source: Any, rows: Any) -> None:
        """Do ``target[:] = source[rows]`` in one launch; all are native, and `rows` are int32."""

    def region(self, nbytes: int) -> Region:
        """Allocate zeroed memory that can be released and mapped again at its address."""

    def synchronize(self) -> None: ...

    def memory_info(self) -> tuple[int, int]:
        """Return free and total memory, in bytes."""

    def reset_peak_memory(self) -> None:
        """Start measuring the peak of allocated memory."""

    def peak_memory(self) -> int:
        """Return the most bytes allocated at once since `reset_peak_memory`, less those allocated
        now."""

    def memory_in_use(self) -> int:
        """Return the bytes that this process holds: on a device, or resident on the host."""

    def return_free_memory(self) -> None:
        """Release pages that the host's allocator keeps, if results are allocated on the host."""

    def capturing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for capturing graphs, on a stream other than the default one."""

    def host_streams(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which upstream code may create streams and events."""


def requested_device() -> str:
    """Return the value of ``NPU_PREP_DEVICE``: ``auto``, ``npu`` or ``cpu``; refuse any other."""
    value = os.environ.get(DEVICE_ENV_VAR, "auto").strip().lower() or "auto"
    if value not in DEVICE_CHOICES:
        raise PrepError(
            f"{DEVICE_ENV_VAR}={value!r} is not a device: use one of {', '.join(DEVICE_CHOICES)}"
        )
    return value


def choose_device() -> DeviceKind:
    """Choose between NPUs and the CPU fallback.

    ``auto`` chooses an NPU if torch_npu sees one, and the CPU if torch_npu is absent. torch_npu
    without a visible NPU is an error; there is never a silent fallback to the CPU.

    Raises
    ------
    PrepError
        If that device can't be used; the message says what to check.
    """
    choice = requested_device()
    if choice == "cpu":
        return CPU_KIND
    from vllm_npu_prep.device.probe import probe_npu

    probe = probe_npu()
    if probe.visible:
        return NPU_KIND
    if choice == "auto" and not probe.installed:
        return CPU_KIND
    raise PrepError(
        f"{DEVICE_ENV_VAR}={choice}: {probe.reason}. Install torch_npu (pip install "
        "'vllm_npu_prep[npu]'), check `npu-smi info`, /dev/davinci* and ASCEND_RT_VISIBLE_DEVICES, "
        f"or set {DEVICE_ENV_VAR}=cpu"
    )


def _module(device_type: str) -> Any:
    """Return the module ``npu`` or ``cpu``, which have the same functions."""
    if device_type == "npu":  # it needs torch_npu
        from vllm_npu_prep.device import npu

        return npu
    from vllm_npu_prep.device import cpu

    return cpu


def make_device(device_type: str, index: int = 0) -> Device:
    """Make a device of the type that `choose_device` chose; `index` counts visible devices."""
    module = _module(device_type)
    return module.NPUDevice(index) if device_type == "npu" else module.CPUDevice()


def copy_stream(device: torch.device) -> CopyStream:
    return _module(device.type).CopyStream(device)


def host_memory(device_type: str, nbytes: int) -> torch.Tensor:
    """Allocate host memory for copies with a device, int8 ``[nbytes]``; page-locked for NPUs."""
    if device_type == "npu":
        return torch.empty(nbytes, dtype=torch.int8, pin_memory=True)
    return torch.from_numpy(np.zeros(nbytes, np.int8))  # pages that are taken on first use


def host_bytes(device_type: str, nbytes: int) -> int:
    """Return the bytes of the host that `host_memory` takes for `nbytes`.

    Pinned memory is rounded up to a power of two, unless a threshold is set and exceeded.
    """
    if device_type != "npu":
        return nbytes
    settings = os.environ.get(ALLOCATOR_ENV_VAR, "").replace(" ", "")
    threshold = re.search(rf"{PINNED_THRESHOLD}:(\d+)", settings)
    if threshold is not None and nbytes > int(threshold[1]) << 20:
        return nbytes
    return 1 << (nbytes - 1).bit_length()


def device_name(device_type: str, index: int = 0) -> str:
    """Return the name of the chip, such as ``Ascend910B1``; ``cpu`` on the CPU fallback."""
    return _module(device_type).device_name(index)


def set_device(device: torch.device) -> None:
    _module(device.type).set_device(device)


def total_memory(device_type: str, index: int = 0) -> int:
    """Return the memory of a device, in bytes."""
    return _module(device_type).total_memory(index)


def visible_devices(device_type: str) -> int | None:
    """Return how many devices this host's ranks share; None for no limit."""
    return _module(device_type).visible_devices()


def has_collectives(device_type: str) -> bool:
    return _module(device_type).has_collectives()


def cann_version(device_type: str) -> str:
    """Return the version of CANN, such as ``9.1.0``; empty if not needed or unknown."""
    return _module(device_type).installed_version("CANN")


def driver_version(device_type: str) -> str:
    """Return the version of the driver, such as ``25.5.1``; empty if not needed or unknown."""
    return _module(device_type).installed_version("DRIVER")


def waits_for_launches(device_type: str) -> bool:
    """Return whether torch_npu waits on the host for each launch and each replay of a graph.

    It reads the number at the beginning of the variable, as ``strtol`` does.
    """
    number = re.match(r"\s*[+-]?\d+", os.environ.get(BLOCKING_ENV_VAR, ""))
    return device_type == "npu" and number is not None and int(number[0]) != 0


def graph_pool(device_type: str) -> Any:
    """Return the handle of a memory pool for graphs; None on the CPU."""
    return _module(device_type).graph_pool()


def free_memory() -> int:
    """Return the free memory of the host, in bytes."""
    return psutil.virtual_memory().available
