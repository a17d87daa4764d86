"""The device interface on Ascend NPUs, through torch_npu."""

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
import torch_npu

from vllm_npu_prep.compat.torch import CudaNames
from vllm_npu_prep.device.cpu_binding import bind_to_device
from vllm_npu_prep.device.npu_regions import NPURegion


def visible_devices() -> int:
    return torch_npu.npu.device_count()


def has_collectives() -> bool:
    """Return whether HCCL exists; a library of that name may be empty."""
    try:
        return hasattr(ctypes.CDLL("libhccl.so"), "HcclGetRootInfo")
    except OSError:  # torch_npu found it elsewhere
        return True


def free_streams() -> int | None:
    """Return how many streams the current device has left; None if CANN doesn't tell.

    torch_npu has no function for it. Source: CANN's reference of ``aclrtGetStreamAvailableNum``.
    """
    try:
        ask = ctypes.CDLL("libascendcl.so").aclrtGetStreamAvailableNum
    except (OSError, AttributeError):  # torch_npu found the library elsewhere, or it is older
        return None
    count = ctypes.c_uint32()
    return count.value if ask(ctypes.byref(count)) == 0 else None


def set_device(device: torch.device) -> None:
    torch_npu.npu.set_device(device)


def device_name(device_id: int) -> str:
    return torch_npu.npu.get_device_name(device_id)


def total_memory(device_id: int) -> int:
    return torch_npu.npu.mem_get_info(device_id)[1]


def versions() -> dict[str, str]:
    found = {name: installed_version(name.upper()) for name in ("CANN", "driver")}
    return {name: version for name, version in found.items() if version}


@lru_cache
def installed_version(package: str) -> str:
    """Return the version of ``CANN`` or of the ``DRIVER``, without setting a device.

    It is empty if it is unknown, as that of the host's driver is in a container without
    /etc/ascend_install.info.
    """
    try:
        return torch_npu.npu.utils.get_cann_version(package)
    except Exception:  # whatever a broken installation raises; the doctor says what is wrong
        return ""


def graph_pool() -> Any:
    return torch_npu.npu.graph_pool_handle()


class NPUDevice:
    """One NPU; see `vllm_npu_prep.device.Device`."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("npu", index)
        self.computes_on_host = False
        torch_npu.npu.set_device(self.device)
        self.name = device_name(index)
        self._capture_stream = torch_npu.npu.Stream()  # shared by graphs that share memory

    def bind_cpus(self) -> str:
        return bind_to_device(self.device.index)

    def allow_captures(self) -> str:
        """Lower torch_npu's task queue to level 1, because ``capture_begin`` refuses level 2."""
        if torch_npu.npu.get_task_queue_enable() != 2:
            return ""
        torch_npu.npu.set_task_queue_enable(1)
        return "TASK_QUEUE_ENABLE=2 is taken for 1: no graph can be captured with it"

    def record_event(self) -> object:
        event = torch_npu.npu.Event()
        event.record()
        return event

    def wait_event(self, event: Any) -> bool:
        if event.query():
            return False
        event.synchronize()
        return True

    def copy_to_device(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[int], None]:
        def copy(nbytes: int) -> None:
            target[:nbytes].copy_(source[:nbytes], non_blocking=True)

        return copy

    def native(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def scatter(self, target: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
        target.index_copy_(0, indices, values)

    def gather(self, target: torch.Tensor, source: torch.Tensor, rows: torch.Tensor) -> None:
        torch.index_select(source, 0, rows, out=target)

    def zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.int8, device=self.device)

    def region(self, nbytes: int) -> NPURegion:
        return NPURegion(nbytes, self.device)

    def synchronize(self) -> None:
        torch_npu.npu.synchronize()

    def memory_info(self) -> tuple[int, int]:
        """Return free and total bytes; unused memory of torch_npu's allocator counts as free."""
        torch_npu.npu.empty_cache()
        return torch_npu.npu.mem_get_info(self.device)

    def reset_peak_memory(self) -> None:
        torch_npu.npu.reset_peak_memory_stats(self.device)

    def peak_memory(self) -> int:
        peak = torch_npu.npu.max_memory_allocated(self.device)
        return peak - self.memory_in_use()

    def memory_in_use(self) -> int:
        return torch_npu.npu.memory_allocated(self.device)

    def return_free_memory(self) -> None: ...  # results are on the device

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture on a separate stream, after all work issued before and before all work issued
        later."""
        torch_npu.npu.synchronize()
        with torch_npu.npu.stream(self._capture_stream):
            yield
        torch_npu.npu.synchronize()

    def host_streams(self) -> contextlib.AbstractContextManager[None]:
        return CudaNames(
            Event=torch_npu.npu.Event,
            Stream=torch_npu.npu.Stream,
            current_stream=torch_npu.npu.current_stream,
            stream=torch_npu.npu.stream,
        )


class CopyStream:
    """A stream of an NPU; see `vllm_npu_prep.device.CopyStream`."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch_npu.npu.Stream(device=device)

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        self._stream.wait_stream(torch_npu.npu.current_stream())
        end = torch_npu.npu.Event()
        with torch_npu.npu.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            end.record()
        return end
