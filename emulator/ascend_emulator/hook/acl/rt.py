"""Functions of `acl.rt`, which call the emulated runtime."""

import ctypes
import functools

ACL_MEMCPY_HOST_TO_HOST = 0
ACL_MEMCPY_HOST_TO_DEVICE = 1
ACL_MEMCPY_DEVICE_TO_HOST = 2
ACL_MEMCPY_DEVICE_TO_DEVICE = 3


@functools.cache
def _copy():
    function = ctypes.CDLL("libascendcl.so").aclrtMemcpy
    address, size = ctypes.c_void_p, ctypes.c_size_t
    function.argtypes = [address, size, address, size, ctypes.c_int]
    return function


def memcpy(dst, dest_max, src, count, kind):
    """Copy and wait; returns ACL's status."""
    return _copy()(dst, dest_max, src, count, kind)
