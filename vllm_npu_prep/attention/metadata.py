"""AscendMetadata: all that attention reads of a step, one object for each KV-cache group."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionMetadata, CommonAttentionMetadata

from vllm_npu_prep.device.staging import StagedArrays
from vllm_npu_prep.prep.batch import PreparedStep
from vllm_npu_prep.prep.state import AttentionState


@dataclass
class AscendMetadata(AttentionMetadata):
    """The attention metadata of one KV-cache group for one step.

    With chunked local attention, requests are virtual requests (`prep.local_attention`).

    ``R`` is the number of requests that attention sees, and ``T`` the number of tokens; both
    include padding in full graphs only. Host values (``_np``) were computed on the host, not read
    back from the device.
    """

    attn_state: AttentionState
    # Dense matrix [max_seq_len, max_seq_len], dense rows [num_input_tokens, max_seq_len],
    # the constant [2048, 2048], or None
    attn_mask: torch.Tensor | None
    block_tables: torch.Tensor | None  # [R, max_num_blocks] int32; None without a cache
    slot_mapping: torch.Tensor | None  # [num_input_tokens] int32; None without a cache
    query_start_loc: torch.Tensor  # [R + 1] int32
    query_start_loc_np: np.ndarray  # [R + 1] int32, host
    seq_lens: torch.Tensor  # [R] int32
    seq_lens_np: np.ndarray  # [R] int32, host
    num_computed_tokens: torch.Tensor  # [R] int32
    num_reqs: int  # requests that were scheduled
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int  # tokens that were scheduled
    num_input_tokens: int  # tokens after graph padding
    sliding_window: int | None = None
    attention_chunk_size: int | None = None  # if set, requests are virtual, with one chunk each
    causal: bool = True  # False: tokens see each other both ways, over this step's K and V only
    in_full_graph: bool = False  # attention is inside a graph, and sees padding
    kernel_plan: Any = None  # computed once by the kernel family for all layers of the step
    tasks: Any = None  # where attention is captured (`vllm_npu_prep.graph.npu.AttentionTasks`)
    # Under decode context parallelism (`attention.context_parallel.DCPStep`)
    shared: Any = None
    halves: Any = None  # of latent attention with prefills (`attention.latent.Halves`)
    # Prefill context parallelism: requests are rows of the rank, whose `slot_mapping` is that of
    # all ranks' tokens as they are gathered (`attention.prefill_context_parallel`)
    gathers: bool = False

    @property
    def num_attended_tokens(self) -> int:
        return self.num_input_tokens if self.in_full_graph else self.num_actual_tokens

    @cached_property
    def query_lens(self) -> np.ndarray:
        """Return the number of tokens of each request, int32 ``[R]`` on the host."""
        return np.diff(self.query_start_loc_np)


class VirtualRequests(NamedTuple):
    """What a group sees in place of requests, in the fields of `AscendMetadata`: with attention
    chunks their parts, with prefill context parallelism the rows of a rank."""

    query_start_loc: torch.Tensor
    query_start_loc_np: np.ndarray
    seq_lens: torch.Tensor
    seq_lens_np: np.ndarray
    num_computed_tokens: torch.Tensor
    num_reqs: int
    max_query_len: int
    max_seq_len: int


def common_metadata(
    step: PreparedStep,
    staged: StagedArrays,
    block_table: torch.Tensor,  # [num_reqs_padded, max_num_blocks] int32
    slot_mapping: torch.Tensor,  # [num_input_tokens] int32
) -> CommonAttentionMetadata:
    """Return the step without padding as vLLM's common metadata, which drafters read."""
    num_reqs, num_tokens = step.num_reqs, step.total_num_scheduled_tokens
    arrays, cpu = staged.device, staged.cpu
    return CommonAttentionMetadata(
        query_start_loc=arrays.query_start_loc[: num_reqs + 1],
        query_start_loc_cpu=cpu.query_start_loc[: num_reqs + 1],
        seq_lens=arrays.seq_lens[:num_reqs],
        num_reqs=num_reqs,
        num_actual_tokens=num_tokens,
        max_query_len=step.max_query_len,
        max_seq_len=step.max_seq_len,
        block_table_tensor=block_table[:num_reqs],
        slot_mapping=slot_mapping[:num_tokens],
        seq_lens_cpu_upper_bound=cpu.seq_lens[:num_reqs],
        positions=arrays.positions[:num_tokens],
    )
