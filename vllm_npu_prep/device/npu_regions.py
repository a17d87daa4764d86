"""Regions on NPUs: addresses that are reserved once, and physical memory that is mapped there.

Sources: CANN's reference of virtual memory management (``aclrtReserveMemAddress`` and the five
calls beside it), acl_rt.h for the structures, and how torch_npu's NPUCachingAllocator.cpp calls
them for ``expandable_segments``.
"""

import contextlib
import ctypes
import weakref
from collections.abc import Callable

import torch
import torch_npu

from vllm_npu_prep.device.regions import refuse_to_wake
from vllm_npu_prep.errors import PrepError

PAGE = 2 << 20
"""Bytes of a page of device memory; sizes of physical memory are multiples."""

_HUGE_PAGES = 4  # ACL_HBM_MEM_HUGE
_ON_DEVICE = 1  # ACL_MEM_LOCATION_TYPE_DEVICE
_HUGE_PAGE_ADDRESSES = 1  # HUGE_PAGE_TYPE, the flag of aclrtReserveMemAddress


class _Location(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("type", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """aclrtPhysicalMemProp."""

    _fields_ = [
        ("handle_type", ctypes.c_int),  # ACL_MEM_HANDLE_TYPE_NONE
        ("allocation_type", ctypes.c_int),  # ACL_MEM_ALLOCATION_TYPE_PINNED
        ("attribute", ctypes.c_int),
        ("location", _Location),
        ("reserve", ctypes.c_uint64),
    ]


class NPURegion:
    """See `vllm_npu_prep.device.regions.Region`.

    Parameters
    ----------
    nbytes
        Size.
    device
        An NPU, the current one of this thread.

    Raises
    ------
    PrepError
        If CANN lacks virtual memory management, or the device has no memory.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._acl = ctypes.CDLL("libascendcl.so")
        if not hasattr(self._acl, "aclrtReserveMemAddress"):
            raise PrepError(
                "sleep mode: this CANN lacks virtual memory management (aclrtReserveMemAddress); "
                "install a newer CANN, or leave --enable-sleep-mode out"
            )
        self._device, self._size = device, -(-nbytes // PAGE) * PAGE
        self._address, self._physical = ctypes.c_void_p(), ctypes.c_void_p()
        size, none = ctypes.c_size_t(self._size), ctypes.c_size_t(0)
        flag = ctypes.c_uint64(_HUGE_PAGE_ADDRESSES)
        self._demand("ReserveMemAddress", ctypes.byref(self._address), size, none, None, flag)
        self.is_mapped = False
        self._kept: torch.Tensor | None = None  # uint8 [nbytes], pinned
        storage = torch_npu._C._construct_storage_from_data_pointer(
            self._address.value, device, self._size
        )
        self.data = torch.empty(0, dtype=torch.uint8, device=device)
        self.data.set_(storage, 0, (nbytes,), (1,))
        try:
            self.map()
        except PrepError:
            self._call("ReleaseMemAddress", self._address)
            raise
        # CANN counts what a process leaves behind as lost
        self._end = weakref.finalize(self, self._give_all_back, self._acl, self._handles)

    @property
    def _handles(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        return self._address, self._physical

    @staticmethod
    def _give_all_back(acl: ctypes.CDLL, handles: tuple[ctypes.c_void_p, ctypes.c_void_p]) -> None:
        address, physical = handles
        with contextlib.suppress(RuntimeError):  # of work that failed: it is over as well
            torch_npu.npu.synchronize()
        if physical.value:
            acl.aclrtUnmapMem(address)
            acl.aclrtFreePhysical(physical)
        acl.aclrtReleaseMemAddress(address)

    def release(self, keep: bool) -> None:
        """See `Region`; the caller has waited for the device."""
        if not self.is_mapped:
            return
        if keep:
            try:
                self._kept = torch.empty_like(self.data, device="cpu", pin_memory=True)
            except RuntimeError as error:
                raise PrepError(
                    f"sleep: the host has no {self.data.numel():,} bytes of pinned memory for "
                    f"weights ({error}), and nothing of them was released"
                ) from error
            self._kept.copy_(self.data)
        self._demand("UnmapMem", self._address)
        self._demand("FreePhysical", self._physical)
        self._physical.value = None
        self.is_mapped = False

    def map(self) -> None:
        """See `Region`."""
        if self.is_mapped:
            return
        prop = _Properties(0, 0, _HUGE_PAGES, _Location(self._device.index, _ON_DEVICE), 0)
        size, none = ctypes.c_size_t(self._size), ctypes.c_uint64(0)
        error = self._call(
            "MallocPhysical", ctypes.byref(self._physical), size, ctypes.byref(prop), none
        )
        if error:
            self._physical.value = None
            refuse_to_wake(self._size, f"aclrtMallocPhysical: {error}")
        at, offset = self._address, ctypes.c_size_t(0)
        error = self._call("MapMem", at, size, offset, self._physical, none)
        if error:
            self._call("FreePhysical", self._physical)
            self._physical.value = None
            refuse_to_wake(self._size, f"aclrtMapMem: {error}")
        self.is_mapped = True
        if self._kept is None:
            self.data.zero_()  # what other programs left may be NaN, which masks don't stop
        else:
            self.data.copy_(self._kept)
            self._kept = None

    def _call(self, name: str, *args: object) -> int:
        function: Callable[..., int] = getattr(self._acl, f"aclrt{name}")
        return function(*args)

    def _demand(self, name: str, *args: object) -> None:
        error = self._call(name, *args)
        if error:
            raise PrepError(f"sleep mode: aclrt{name} failed with {error}; see CANN's log")
