"""Masks on the device: gathered from one cached causal matrix, never uploaded, never changed."""

import torch

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.prep.mask import COMPRESSED_MASK_SIZE, MaskKind, MaskPlan

SMALLEST_MATRIX = 128
"""Side of the first causal matrix; it doubles until the longest sequence fits."""


class MaskCache:
    """Makes the mask of a plan on one device.

    Parameters
    ----------
    device
        Where masks live.
    max_model_len
        Longest sequence; no matrix is larger.
    budget_bytes
        Most memory that one causal matrix may take.
    dtype, masked_values
        Dense masks as the kernel family takes them (`KernelFamily.mask_values`): their masked value
        by kind of mask; None: bool.

    Notes
    -----
    A matrix that has been handed out is never written again: growing makes a new one, so that
    metadata in flight keeps its mask (vllm-project/vllm-ascend 1678).
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
        # By sliding window and masked value
        self._matrices: dict[tuple[int | None, float], torch.Tensor] = {}
        self._compressed: torch.Tensor | None = None

    def build(self, plan: MaskPlan, positions: torch.Tensor) -> torch.Tensor | None:
        """Mask of `plan`.

        Parameters
        ----------
        plan
            What `vllm_npu_prep.prep.mask.plan_mask` decided.
        positions
            int64 ``[num_actual_tokens]`` on the device, padding excluded.

        Returns
        -------
        torch.Tensor or None
            Of shape ``plan.shape``; the family's dtype for dense kinds, int8 for the constant.

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
        # A strided input is copied first: no more of it than positions can reach.
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
        """The mask of every compressed plan, int8 ``[2048, 2048]``."""
        if self._compressed is None:
            size = COMPRESSED_MASK_SIZE
            ones = torch.ones(size, size, dtype=torch.int8, device=self.device)
            self._compressed = ones.triu_(1)
        return self._compressed
