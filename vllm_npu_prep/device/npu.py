"""Ascend NPUs through torch_npu."""

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
import torch_npu

from vllm_npu_prep.compat import torch_names
from vllm_npu_prep.device.cpu_binding import bind_to_device
from vllm_npu_prep.device.npu_regions import NPURegion


def visible_devices() -> int:
    """NPUs that this process may use."""
    return torch_npu.npu.device_count()


def has_collectives() -> bool:
    """Whether HCCL exists; a library of that name may be empty."""
    try:
        return hasattr(ctypes.CDLL("libhccl.so"), "HcclGetRootInfo")
    except OSError:  # torch_npu found it elsewhere
        return True


def free_streams() -> int | None:
    """Streams that the current device has left; None if CANN doesn't tell.

    torch_npu has no function for it. Source: CANN's reference of ``aclrtGetStreamAvailableNum``.
    """
    try:
        ask = ctypes.CDLL("libascendcl.so").aclrtGetStreamAvailableNum
    except (OSError, AttributeError):  # torch_npu found the library elsewhere, or it is older
        return None
    count = ctypes.c_uint32()
    return count.value if ask(ctypes.byref(count)) == 0 else None


def set_device(device: torch.device) -> None:
    """Make an NPU that of the calling thread."""
    torch_npu.npu.set_device(device)


def soc_name(device_id: int = 0) -> str:
    """Name of the chip, such as ``Ascend910B1``."""
    return torch_npu.npu.get_device_name(device_id)


def total_memory(device_id: int = 0) -> int:
    """Memory of a device in bytes."""
    return torch_npu.npu.mem_get_info(device_id)[1]


def versions() -> dict[str, str]:
    """Versions of CANN and of the driver, as far as CANN tells them."""
    found = {name: installed_version(name.upper()) for name in ("CANN", "driver")}
    return {name: version for name, version in found.items() if version}


@lru_cache
def installed_version(package: str) -> str:
    """Version of ``CANN`` or of the ``DRIVER``, without setting a device; empty if unknown.

    A container without /etc/ascend_install.info doesn't tell that of its host's driver.
    """
    try:
        return torch_npu.npu.utils.get_cann_version(package)
    except Exception:  # whatever a broken installation raises; the doctor says what is wrong
        return ""


def graph_pool() -> Any:
    """Handle of a memory pool that graphs share."""
    return torch_npu.npu.graph_pool_handle()


class NPUDevice:
    """One NPU; see `vllm_npu_prep.device.Device`."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("npu", index)
        self.computes_on_host = False
        torch_npu.npu.set_device(self.device)
        self.name = soc_name(index)
        self._capture_stream = torch_npu.npu.Stream()  # shared by graphs that share memory

    def bind_cpus(self) -> str:
        """See `vllm_npu_prep.device.cpu_binding`."""
        return bind_to_device(self.device.index)

    def allow_captures(self) -> str:
        """Take torch_npu's task queue down to level 1: ``capture_begin`` refuses level 2."""
        if torch_npu.npu.get_task_queue_enable() != 2:
            return ""
        torch_npu.npu.set_task_queue_enable(1)
        return "TASK_QUEUE_ENABLE=2 is taken for 1: no graph can be captured with it"

    def record_event(self) -> object:
        """An event at the current end of the current stream."""
        event = torch_npu.npu.Event()
        event.record()
        return event

    def wait_event(self, event: Any) -> bool:
        """Wait on the host; True if the event had not happened yet."""
        if event.query():
            return False
        event.synchronize()
        return True

    def copy_to_device(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[int], None]:
        """Returns a function that copies pinned memory in stream order."""

        def copy(nbytes: int) -> None:
            target[:nbytes].copy_(source[:nbytes], non_blocking=True)

        return copy

    def native(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def scatter(self, target: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
        """One launch."""
        target.index_copy_(0, indices, values)

    def gather(self, target: torch.Tensor, source: torch.Tensor, rows: torch.Tensor) -> None:
        """One launch."""
        torch.index_select(source, 0, rows, out=target)

    def zeros(self, nbytes: int) -> torch.Tensor:
        """A zeroed buffer, int8 ``[nbytes]``."""
        return torch.zeros(nbytes, dtype=torch.int8, device=self.device)

    def region(self, nbytes: int) -> NPURegion:
        """Physical memory at reserved addresses."""
        return NPURegion(nbytes, self.device)

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch_npu.npu.synchronize()

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes; unused memory of torch_npu's allocator counts as free."""
        torch_npu.npu.empty_cache()
        return torch_npu.npu.mem_get_info(self.device)

    def reset_peak_memory(self) -> None:
        """Start measuring the peak."""
        torch_npu.npu.reset_peak_memory_stats(self.device)

    def peak_memory(self) -> int:
        """Most bytes allocated at once since `reset_peak_memory`, less those allocated now."""
        peak = torch_npu.npu.max_memory_allocated(self.device)
        return peak - self.memory_in_use()

    def memory_in_use(self) -> int:
        """Bytes that torch_npu's allocator has given out."""
        return torch_npu.npu.memory_allocated(self.device)

    def return_free_memory(self) -> None:
        """Nothing: results are on the device."""

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """On its own stream: after all work issued before, and before all work issued later."""
        torch_npu.npu.synchronize()
        with torch_npu.npu.stream(self._capture_stream):
            yield
        torch_npu.npu.synchronize()

    def host_streams(self) -> contextlib.AbstractContextManager[None]:
        """NPU streams and events under the names that upstream uses."""
        return torch_names.cuda_names(
            Event=torch_npu.npu.Event,
            Stream=torch_npu.npu.Stream,
            current_stream=torch_npu.npu.current_stream,
            stream=torch_npu.npu.stream,
        )


class NPUTransfer:
    """Copies before an event; see `vllm_npu_prep.device.transfers.Transfer`."""

    def __init__(self, end: Any) -> None:
        self._end = end

    def is_done(self) -> bool:
        """Whether the event has happened."""
        return self._end.query()

    def wait(self) -> None:
        """Wait for the event."""
        self._end.synchronize()


class NPUCopyStream:
    """A stream of an NPU; see `vllm_npu_prep.device.transfers.CopyStream`."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch_npu.npu.Stream(device=device)

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> NPUTransfer:
        """After all work of the current stream, without waiting on the host."""
        self._stream.wait_stream(torch_npu.npu.current_stream())
        end = torch_npu.npu.Event()
        with torch_npu.npu.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            end.record()
        return NPUTransfer(end)
