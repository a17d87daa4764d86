"""Regions on NPUs: address ranges that are reserved once, and physical memory that is mapped there.

Sources: CANN's reference of virtual memory management (``aclrtReserveMemAddress`` and the five
calls beside it), acl_rt.h for the structures, and how torch_npu's NPUCachingAllocator.cpp calls
them for ``expandable_segments``.
"""

import contextlib
import ctypes
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch_npu

from vllm_npu_prep.device.regions import refuse_to_wake
from vllm_npu_prep.errors import PrepError

PAGE = 2 << 20
"""The bytes of a page of device memory; sizes of physical memory are multiples of it."""

PIECE = 1 << 30
"""The most bytes of one physical allocation. torch_npu's own segments have no larger ones, so a
driver may not serve tens of gigabytes at once. The addresses of a region are one range anyway."""

_HUGE_PAGES = 4  # ACL_HBM_MEM_HUGE
_ON_DEVICE = 1  # ACL_MEM_LOCATION_TYPE_DEVICE
_HUGE_PAGE_ADDRESSES = 1  # HUGE_PAGE_TYPE, the flag of aclrtReserveMemAddress


class _Location(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("type", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CANN's ``aclrtPhysicalMemProp``."""

    _fields_ = [
        ("handle_type", ctypes.c_int),  # ACL_MEM_HANDLE_TYPE_NONE
        ("allocation_type", ctypes.c_int),  # ACL_MEM_ALLOCATION_TYPE_PINNED
        ("attribute", ctypes.c_int),
        ("location", _Location),
        ("reserve", ctypes.c_uint64),
    ]


class _Piece(NamedTuple):
    """Physical memory, and the address at which it is mapped."""

    address: ctypes.c_void_p
    physical: ctypes.c_void_p


class NPURegion:
    """Memory of an NPU as a `vllm_npu_prep.device.regions.Region`.

    `device` has to be the current device of this thread. The mapped memory is `nbytes`, rounded up
    to whole pages.

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
        self._address = ctypes.c_void_p()
        self._pieces: list[_Piece] = []  # mapped ones, in the order of their addresses
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
        # CANN treats memory that a process leaves behind as lost
        give_back = self._give_all_back
        self._end = weakref.finalize(self, give_back, self._acl, self._address, self._pieces)

    @staticmethod
    def _give_all_back(acl: ctypes.CDLL, address: ctypes.c_void_p, pieces: "list[_Piece]") -> None:
        with contextlib.suppress(RuntimeError):  # work that failed has ended, too
            torch_npu.npu.synchronize()
        for piece in pieces:
            acl.aclrtUnmapMem(piece.address)
            acl.aclrtFreePhysical(piece.physical)
        acl.aclrtReleaseMemAddress(address)

    def release(self, keep: bool) -> None:
        """Release the memory; the caller has waited for the device."""
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
        self._unmap()
        self.is_mapped = False

    def map(self) -> None:
        if self.is_mapped:
            return
        for begin in range(0, self._size, PIECE):
            failed = self._map_piece(begin, min(PIECE, self._size - begin))
            if failed:
                self._unmap()
                refuse_to_wake(self._size, failed)
        self.is_mapped = True
        if self._kept is None:
            self.data.zero_()  # what other programs left may be NaN, which masks don't stop
        else:
            self.data.copy_(self._kept)
            self._kept = None

    def _map_piece(self, begin: int, nbytes: int) -> str:
        """Map physical memory from an offset on; return which call failed, empty if none did."""
        prop = _Properties(0, 0, _HUGE_PAGES, _Location(self._device.index, _ON_DEVICE), 0)
        size, none, physical = ctypes.c_size_t(nbytes), ctypes.c_uint64(0), ctypes.c_void_p()
        error = self._call("MallocPhysical", ctypes.byref(physical), size, ctypes.byref(prop), none)
        if error:
            return f"aclrtMallocPhysical: {error}"
        at, offset = ctypes.c_void_p((self._address.value or 0) + begin), ctypes.c_size_t(0)
        error = self._call("MapMem", at, size, offset, physical, none)
        if error:
            self._call("FreePhysical", physical)
            return f"aclrtMapMem: {error}"
        self._pieces.append(_Piece(at, physical))
        return ""

    def _unmap(self) -> None:
        while self._pieces:
            piece = self._pieces[-1]
            self._demand("UnmapMem", piece.address)
            self._pieces.pop()
            self._demand("FreePhysical", piece.physical)

    def _call(self, name: str, *args: object) -> int:
        function: Callable[..., int] = getattr(self._acl, f"aclrt{name}")
        return function(*args)

    def _demand(self, name: str, *args: object) -> None:
        error = self._call(name, *args)
        if error:
            raise PrepError(f"sleep mode: aclrt{name} failed with {error}; see CANN's log")
