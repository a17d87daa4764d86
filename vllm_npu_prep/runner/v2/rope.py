"""M-RoPE of the V2 runner: positions of prompts by request row, on the host."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.worker.gpu.mm.rope import RopeState

from vllm_npu_prep.prep.mrope import MropeTables


class Rotation(NamedTuple):
    """The M-RoPE positions of a request, under the names that V1's request state has."""

    mrope_positions: np.ndarray  # [num_dims, num_tokens] int64, of the tokens it arrived with
    mrope_position_delta: int  # for later tokens: the position minus the index in the sequence


class NPURopeState(RopeState):
    """M-RoPE positions by request row; a stand-in for upstream's ``RopeState``.

    Upstream keeps positions of whole prompts in memory that host and device share, and a Triton
    kernel picks those of a step. Here the fused pass picks them from `tables`, and the step's one
    copy brings them to the device.

    Attributes
    ----------
    tables
        The positions of the batch's requests, for the fused pass.
    positions
        int64 ``[num_dims, max_num_tokens + 1]`` zeros on the device, for steps that are not
        prepared.
    """

    def __init__(
        self,
        num_dims: int,
        max_num_reqs: int,
        max_num_tokens: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self.num_dims, self.max_model_len = num_dims, max_model_len
        self.tables = MropeTables(num_dims, max_num_reqs)
        self.positions = torch.zeros(num_dims, max_num_tokens + 1, dtype=torch.int64, device=device)
        self._rotations: dict[int, Rotation] = {}  # by request row
        self._followed = np.empty(0, np.int64)  # request rows in the order of `tables`

    def init_prefill_positions(
        self, req_idx: int, model: Any, prefill_token_ids: list[int], mm_features: list[Any]
    ) -> None:
        positions, delta = model.get_mrope_input_positions(prefill_token_ids, mm_features)
        of_prompt = np.ascontiguousarray(positions.numpy(), np.int64)
        self._rotations[req_idx] = Rotation(of_prompt, int(delta))
        self._followed = np.empty(0, np.int64)

    def apply_staged_writes(self) -> None:
        """Do nothing: positions travel with their step."""

    def follow(self, request_rows: np.ndarray) -> None:
        """Set `tables` to the requests at these request rows, int ``[num_reqs]``, in this order."""
        if not np.array_equal(request_rows, self._followed):
            self.tables.set_rows(
                [self._rotations[request_row] for request_row in request_rows.tolist()]
            )
            self._followed = request_rows

    def of_requests(self, row_of: Mapping[str, int]) -> "Rotations":
        """Return the rotations by request, for checks; `row_of` is read at each look-up."""
        return Rotations(self._rotations, row_of)


class Rotations:
    """A view of rotations by request name instead of by request row."""

    def __init__(self, by_row: Mapping[int, Rotation], row_of: Mapping[str, int]) -> None:
        self._by_row, self._row_of = by_row, row_of

    def __getitem__(self, req_id: str) -> Rotation:
        return self._by_row[self._row_of[req_id]]
