"""M-RoPE: positions of several dimensions (time, height, width) in place of the one.

A token of an image has the place of its patch; text counts on in all dimensions alike. What a
prompt's positions are is the model's own rule (``get_rope_index`` of transformers); after the
prompt each token is at its position in the sequence plus one number, the request's
``mrope_position_delta``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numba import carray

from vllm_npu_prep.prep.arrays import Arrays
from vllm_npu_prep.prep.compiled import compiled, pointer


@dataclass
class MropeTables:
    """Where the positions of each request's prompt are, by row of the batch; views, nothing copied.

    Parameters
    ----------
    num_dims
        Dimensions of a position.
    max_num_reqs
        Rows.
    """

    num_dims: int
    max_num_reqs: int
    # Address of each prompt's positions, 0 where they count up from 0 in all dimensions
    addresses: np.ndarray = field(init=False)  # [max_num_reqs] int64
    lengths: np.ndarray = field(init=False)  # [max_num_reqs] int64, of the prompts at an address
    position_deltas: np.ndarray = field(init=False)  # [max_num_reqs] int64
    # By row, int64 [num_dims, length] or, where they count up from 0, empty: kept for as long as
    # they have an address here
    prompts: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.addresses, self.lengths, self.position_deltas = np.zeros(
            (3, self.max_num_reqs), np.int64
        )
        self.prompts = []

    def set_rows(self, requests: Sequence[tuple[np.ndarray | None, int]]) -> None:
        """Enter the requests of the batch.

        Parameters
        ----------
        requests
            For each row: int64 ``[num_dims, num_prompt_tokens]``, or None where all dimensions
            count up from 0; and ``mrope_position_delta``.
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
        """Write ``mrope_positions`` of a step whose other arrays are there."""
        fill_mrope_positions(
            self.addresses,
            self.lengths,
            self.position_deltas,
            arrays.num_computed_tokens,
            arrays.query_start_loc,
            num_reqs,
            arrays.mrope_positions,
        )


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
    """Positions of each scheduled token in every dimension.

    Source: ``get_rope_index`` of transformers for prompts, vLLM's ``_calc_mrope_positions`` for
    what comes after them.
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
