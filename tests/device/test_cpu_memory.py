"""Memory of the CPU fallback's process: what the C library keeps is returned."""

import ctypes

from vllm_npu_prep.device.cpu import CPUDevice

SIZE, COUNT = 64 << 10, 1600
"""Below glibc's threshold for mappings of their own: so they are holes in its heap."""


def test_free_memory_between_what_is_in_use_is_returned():
    """Every 16th allocation stays, so that the heap's end can't move back."""
    device, libc = CPUDevice(), ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    device.return_free_memory()
    before = device.memory_in_use()
    held = [libc.malloc(SIZE) for _ in range(COUNT)]
    for address in held:
        ctypes.memset(address, 1, SIZE)
    for index, address in enumerate(held):
        if index % 16:
            libc.free(address)
    kept = device.memory_in_use() - before
    device.return_free_memory()
    left = device.memory_in_use() - before
    for address in held[::16]:
        libc.free(address)
    assert kept > 0.9 * SIZE * COUNT, "glibc keeps holes"
    assert left < 0.2 * SIZE * COUNT
