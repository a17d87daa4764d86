"""Masks on the device, gathered from one cached causal matrix: never uploaded, never changed."""

import torch

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.prep.mask import COMPRESSED_MASK_SIZE, MaskKind, MaskPlan

SMALLEST_MATRIX = 128
"""The side of the first causal matrix; it is doubled until the longest sequence fits."""


class MaskCache:
    """Makes the masks that `vllm_npu_prep.prep.mask` plans, on one device.

    A matrix that has been returned is never written again: a larger one is a new tensor, so that
    metadata in flight keeps its mask (vllm-project/vllm-ascend 1678).

    Parameters
    ----------
    max_model_len
        The length of the longest sequence; no matrix is larger.
    budget_bytes
        The most memory that one causal matrix may take.
    dtype, masked_values
        The dtype of dense masks, and their masked value by kind of mask
        (`KernelFamily.mask_values`); without values, dense masks are bool.
    """

    def __init__(
        self,
        device: torch.device,
        max_model_len: int,
        budget_bytes: int,
        dtype: torch.dtype = torch.bool,
        masked_values: dict[MaskKind, float] | None = None,
    ) -> None:
        self.device = device
        self.max_model_len = max_model_len
        self.budget_bytes = budget_bytes
        self.dtype = torch.bool if masked_values is None else dtype
        self.masked_values = masked_values or {}
        # The keys are the sliding window and the masked value
        self._matrices: dict[tuple[int | None, float], torch.Tensor] = {}
        self._compressed: torch.Tensor | None = None

    def build(self, plan: MaskPlan, positions: torch.Tensor) -> torch.Tensor | None:
        """Return the mask of `plan`; None if it needs none.

        Parameters
        ----------
        positions
            int64 ``[num_actual_tokens]`` on the device, without padding.

        Returns
        -------
        torch.Tensor or None
            Its shape is ``plan.shape``, its dtype the family's for dense kinds, and int8 for the
            constant.

        Raises
        ------
        PrepError
            If the causal matrix would not fit the budget.
        """
        if plan.shape is None:
            return None
        if plan.kind == MaskKind.COMPRESSED:
            return self.constant()
        num_rows, max_seq_len = plan.shape
        value = self.masked_values.get(plan.kind, True)
        matrix = self._matrix(max_seq_len, plan.sliding_window, value)
        if plan.kind == MaskKind.MATRIX:
            return matrix[:max_seq_len, :max_seq_len].contiguous()  # kernels take no strides
        if plan.attention_chunk_size is not None:
            positions = positions % plan.attention_chunk_size
        # `index_select` copies a strided input first, so it gets only what positions can reach
        rows = matrix[:max_seq_len, :max_seq_len].index_select(0, positions)
        padding = num_rows - rows.shape[0]
        return torch.nn.functional.pad(rows, (0, 0, 0, padding)) if padding else rows

    def _matrix(self, size: int, sliding_window: int | None, value: float) -> torch.Tensor:
        matrix = self._matrices.get((sliding_window, value))
        if matrix is None or matrix.shape[0] < size:
            side = SMALLEST_MATRIX if matrix is None else matrix.shape[0]
            while side < size:
                side *= 2
            side = min(side, max(self.max_model_len, size))
            nbytes = side * side * self.dtype.itemsize
            if nbytes > self.budget_bytes:
                raise PrepError(
                    f"a dense mask for {size} positions takes {nbytes:,} bytes, more than "
                    f"mask_budget_bytes={self.budget_bytes:,}: raise it, lower --max-model-len or "
                    'use {"npu_prep": {"mask": "compressed"}}'
                )
            masked = torch.ones(side, side, dtype=torch.bool, device=self.device).triu_(1)
            if sliding_window is not None:
                masked |= torch.ones_like(masked).tril_(-sliding_window)
            matrix = torch.zeros(side, side, dtype=self.dtype, device=self.device)
            matrix.masked_fill_(masked, value)
            self._matrices[sliding_window, value] = matrix
        return matrix

    def constant(self) -> torch.Tensor:
        """Return the mask of every compressed plan, int8 ``[2048, 2048]``."""
        if self._compressed is None:
            size = COMPRESSED_MASK_SIZE
            ones = torch.ones(size, size, dtype=torch.int8, device=self.device)
            self._compressed = ones.triu_(1)
        return self._compressed
