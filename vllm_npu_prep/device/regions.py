"""Memory whose address stays while its pages are released: what sleep mode needs of a device."""

import mmap
import os
import tempfile
from typing import IO, NoReturn, Protocol

import numpy as np
import psutil
import torch

from vllm_npu_prep.errors import PrepError


class Region(Protocol):
    """Memory at the same address for as long as the object lives."""

    data: torch.Tensor  # uint8 [nbytes], on the device
    is_mapped: bool

    def release(self, keep: bool) -> None:
        """Release the memory; nothing may touch `data` until `map`.

        Parameters
        ----------
        keep
            Whether the host keeps the content. If not, it is lost.

        Raises
        ------
        PrepError
            If the host has no room for the content. The region is still mapped then.
        """

    def map(self) -> None:
        """Map memory at the address again, with the kept content or with zeros.

        Raises
        ------
        PrepError
            If there is no memory. The region is still released then, and its content is kept.
        """


class HostRegion:
    """Pages of this process. The content that is kept goes to a file, as the host is the device."""

    def __init__(self, nbytes: int) -> None:
        # Private, because shared pages stay in memory when they are released
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._pages = mmap.mmap(-1, nbytes, flags=flags)
        self.data = torch.from_numpy(np.frombuffer(self._pages, np.uint8))
        self.is_mapped = True
        self._kept: IO[bytes] | None = None

    def release(self, keep: bool) -> None:
        if not self.is_mapped:
            return
        if keep:
            self._kept = self._written()
        self._pages.madvise(mmap.MADV_DONTNEED)
        self.is_mapped = False

    def _written(self) -> IO[bytes]:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (closed by `map`)
        try:
            # If the disk has room for a part, a call writes that part, and the next one fails
            rest = memoryview(self._pages)
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]
        except OSError as error:
            file.close()
            raise PrepError(
                f"sleep: {self.data.numel():,} bytes of weights do not fit into "
                f"{tempfile.gettempdir()} ({error}), and nothing of them was released: make room "
                "there, or set TMPDIR"
            ) from error
        return file

    def map(self) -> None:
        if self.is_mapped:
            return
        if self._kept is not None:
            nbytes, free = self.data.numel(), psutil.virtual_memory().available
            if nbytes > free:
                refuse_to_wake(nbytes, f"{free:,} bytes of the host are available")
            self._read(self._kept)
            self._kept.close()
            self._kept = None
        self.is_mapped = True

    def _read(self, file: IO[bytes]) -> None:
        rest, why = memoryview(self._pages), "the file ended"
        try:
            file.seek(0)
            while rest and (count := os.readv(file.fileno(), [rest])):
                rest = rest[count:]
        except OSError as error:
            why = str(error)
        if rest:
            self._pages.madvise(mmap.MADV_DONTNEED)
            raise PrepError(
                f"wake-up: the last {len(rest):,} of {self.data.numel():,} bytes of weights could "
                f"not be read back from {tempfile.gettempdir()} ({why}); what was asleep is still "
                "asleep: wake up again, or start the engine again"
            )


def refuse_to_wake(nbytes: int, why: str) -> NoReturn:
    """Raise a `PrepError` that says in one line that a wake-up finds no memory."""
    raise PrepError(
        f"wake-up: no memory for {nbytes:,} bytes ({why}); what was asleep is still asleep: free "
        "memory of the device, then wake up again"
    )
