"""Values of requests on the host and on the device, without Unified Virtual Addressing (UVA).

Upstream's V2 runner keeps what it knows of requests in memory that host and device share, and
copies it anew in every step: 16 copies, and 16 more where memory can't be shared. Here a value is
copied only when it has changed, which is when a request arrives.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d


class RowValues:
    """A value per request row, written on the host; stands in for upstream's ``UvaBackedTensor``.

    Parameters
    ----------
    device
        The device of the copy. If it is the host itself, the copy is the same memory.
    size
        The shape of the values.
    max_concurrency
        Not used: copies run in stream order.

    Attributes
    ----------
    np, gpu
        The values on the host, and their copy on the device as of the last `copy_to_uva`.
    """

    def __init__(
        self,
        device: torch.device,
        size: int | Sequence[int],
        dtype: torch.dtype,
        max_concurrency: int | None = None,
    ) -> None:
        self.dtype = dtype
        # Outside of inference mode: steps change them in place
        with torch.inference_mode(False):
            self.cpu = torch.zeros(size, dtype=dtype)
            self.gpu = self.cpu
            if device.type != "cpu":
                self.gpu = torch.zeros(size, dtype=dtype, device=device)
        self.np = self.cpu.numpy()
        self._sent = self.np.copy() if self.gpu is not self.cpu else None

    def copy_to_uva(self, n: int | None = None) -> torch.Tensor:
        """Copy the values to the device if they have changed; return the first `n` of the copy.

        The name is upstream's.
        """
        if self._sent is not None and not np.array_equal(self._sent, self.np):
            self._sent[:] = self.np
            async_tensor_h2d(self.np, device=self.gpu.device, out=self.gpu)
        return self.gpu if n is None else self.gpu[:n]


class StagedRows:
    """Values per request row on the device; stands in for upstream's ``StagedWriteTensor``.

    Writes are collected and sent together, with one copy and one launch. Memory is allocated by the
    first write or read, because most engines never need it.

    Parameters
    ----------
    size
        The number of rows, or the numbers of rows and of columns.
    max_concurrency, uva_instead_of_gpu
        Not used.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        max_concurrency: int | None = None,
        uva_instead_of_gpu: bool = False,
    ) -> None:
        self.size = (size,) if isinstance(size, int) else tuple(size)
        self.dtype, self.device = dtype, device
        self._np_dtype = np.dtype(str(dtype).removeprefix("torch."))
        self._values: torch.Tensor | None = None
        self._indices: list[np.ndarray] = []
        self._contents: list[np.ndarray] = []

    @property
    def gpu(self) -> torch.Tensor:
        if self._values is None:
            with torch.inference_mode(False):
                self._values = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        return self._values

    def stage_write(self, index: int, start: int, x: Iterable[Any]) -> None:
        """Collect values for row `index`, from column `start` on.

        Raises
        ------
        ValueError
            If they don't fit in the row.
        """
        contents = np.array(list(x), self._np_dtype)
        width = self.size[1] if len(self.size) > 1 else 1
        if len(contents) > width - start:
            raise ValueError(f"{len(contents)} values from column {start} on, of {width}")
        first = index * width + start
        self._indices.append(np.arange(first, first + len(contents), dtype=np.int64))
        self._contents.append(contents)

    def stage_write_elem(self, index: int, x: int) -> None:
        self.stage_write(index, 0, [x])

    def apply_write(self) -> None:
        """Send the collected values. Of two values for the same place, the later one is written."""
        if not self._indices:
            return
        indices, contents = np.concatenate(self._indices), np.concatenate(self._contents)
        self.clear_staged_writes()
        places, last = np.unique(indices[::-1], return_index=True)
        packed = np.concatenate([places.view(np.uint8), contents[::-1][last].view(np.uint8)])
        sent = async_tensor_h2d(packed, device=self.device)
        end = places.nbytes
        values = sent[end:].view(self.dtype)
        self.gpu.view(-1).index_copy_(0, sent[:end].view(torch.int64), values)

    def clear_staged_writes(self) -> None:
        self._indices.clear()
        self._contents.clear()
