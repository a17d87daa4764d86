"""Slot mapping for vLLM's own block tables, which dummy runs and upstream's runner still use."""

import torch


def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,  # [num_reqs + 1] int32
    positions: torch.Tensor,  # [num_tokens] int64
    block_table: torch.Tensor,  # [max_num_reqs, max_num_blocks] int32
    block_table_stride: int,
    slot_mapping: torch.Tensor,  # [max_num_tokens] int64, written
    kv_cache_block_size: int,
    total_cp_world_size: int,
    total_cp_rank: int,
    cp_kv_cache_interleave_size: int,
    pad_id: int,
    block_size: int,
) -> None:
    """Compute each token's slot in the KV cache, as ``ComputeSlotMappingKernel`` does.

    Tokens that another rank keeps get `pad_id`. Arguments have the order of the Triton kernel;
    strides and tile sizes are not used here.
    """
    del max_num_tokens, block_table_stride, block_size
    query_lens = query_start_loc.diff()
    req_indices = torch.arange(len(query_lens), device=positions.device)
    req_indices = req_indices.repeat_interleave(query_lens.long())
    positions = positions[: len(req_indices)]
    tokens_per_block = kv_cache_block_size * total_cp_world_size
    blocks = block_table[req_indices, positions // tokens_per_block].long()
    if total_cp_world_size == 1:
        slots = blocks * kv_cache_block_size + positions % kv_cache_block_size
    else:
        size = cp_kv_cache_interleave_size
        runs = positions % tokens_per_block // size
        offsets = runs // total_cp_world_size * size + positions % size
        slots = blocks * kv_cache_block_size + offsets
        slots = slots.masked_fill(runs % total_cp_world_size != total_cp_rank, pad_id)
    slot_mapping[: len(slots)] = slots
    slot_mapping[num_tokens:] = pad_id
