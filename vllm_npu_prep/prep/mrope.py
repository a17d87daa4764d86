"""M-RoPE: positions with several dimensions (time, height, width) instead of one.

A token of an image has the position of its patch; for text, all dimensions count up alike. The
model decides the positions of a prompt (``get_rope_index`` of transformers). After the prompt, a
token's position is its index in the sequence plus the request's ``mrope_position_delta``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numba import carray

from vllm_npu_prep.prep.arrays import Arrays
from vllm_npu_prep.prep.compiled import compiled, pointer


@dataclass(eq=False)
class MropeTables:
    """The addresses of the positions of each request's prompt, by row of the batch.

    Nothing is copied: `prompts` keeps the memory alive.
    """

    num_dims: int
    max_num_reqs: int
    # Address of each prompt's positions; 0 if they count up from 0 in all dimensions
    addresses: np.ndarray = field(init=False)  # [max_num_reqs] int64
    lengths: np.ndarray = field(init=False)  # [max_num_reqs] int64, of the prompts at an address
    position_deltas: np.ndarray = field(init=False)  # [max_num_reqs] int64
    # By row, int64 [num_dims, length], empty if they count up from 0
    prompts: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.addresses, self.lengths, self.position_deltas = np.zeros(
            (3, self.max_num_reqs), np.int64
        )
        self.prompts = []

    def __bool__(self) -> bool:
        return self.num_dims > 0

    def set_rows(self, requests: Sequence[tuple[np.ndarray | None, int]]) -> None:
        """Set the requests of the batch, and keep the memory of their positions alive.

        Parameters
        ----------
        requests
            For each row: int64 ``[num_dims, num_prompt_tokens]``, or None if all dimensions count
            up from 0; and ``mrope_position_delta``.
        """
        self.prompts = [
            np.ascontiguousarray(prompt if prompt is not None else (), np.int64)
            for prompt, _ in requests
        ]
        for row, ((prompt, delta), kept) in enumerate(zip(requests, self.prompts)):
            self.addresses[row] = 0 if prompt is None else kept.ctypes.data
            self.lengths[row] = 0 if prompt is None else kept.shape[1]
            self.position_deltas[row] = delta

    def fill(self, num_reqs: int, arrays: Arrays[np.ndarray]) -> None:
        """Write ``mrope_positions`` of a step whose other arrays are written already."""
        fill_mrope_positions(
            self.addresses,
            self.lengths,
            self.position_deltas,
            arrays.num_computed_tokens,
            arrays.query_start_loc,
            num_reqs,
            arrays.mrope_positions,
        )


NO_MROPE = MropeTables(0, 0)
"""The tables of a model without M-RoPE, which are false."""


@compiled
def fill_mrope_positions(
    addresses,  # [max_num_reqs] int64
    lengths,  # [max_num_reqs] int64
    position_deltas,  # [max_num_reqs] int64
    num_computed_tokens,  # [num_reqs or more] int32
    query_start_loc,  # [num_reqs + 1 or more] int32
    num_reqs,
    mrope_positions,  # [num_dims, num_input_tokens] int64, written
):
    """Write the positions of each scheduled token in every dimension.

    Source: ``get_rope_index`` of transformers for prompts, vLLM's ``_calc_mrope_positions`` for the
    tokens after them.
    """
    num_dims = mrope_positions.shape[0]
    for dim in range(num_dims):
        for req in range(num_reqs):
            token, end = query_start_loc[req], query_start_loc[req + 1]
            position, length = num_computed_tokens[req], lengths[req]
            if position < length:
                prompt = carray(pointer(addresses[req]), (num_dims, length), np.int64)
                while token < end and position < length:
                    mrope_positions[dim, token] = prompt[dim, position]
                    token += 1
                    position += 1
            delta = position_deltas[req]
            while token < end:
                mrope_positions[dim, token] = position + delta
                token += 1
                position += 1
