"""The drafters' Triton kernels in torch, vectorised over requests and tokens.

Arguments have the order of the Triton kernels (``vllm.v1.spec_decode.utils``); vLLM's dispatcher
routes their launches here. Shapes follow from sizes that the host knows, so nothing is read back.
Scalars are written by ``masked_fill``, because ``torch.where`` would first make tensors of them.
"""

import torch


def eagle_step_slot_mapping_metadata(
    positions: torch.Tensor,  # [batch_size] int64
    block_table: torch.Tensor,  # [at least batch_size, n_blocks_per_req] int32
    block_table_stride: int,
    seq_lens: torch.Tensor,  # [at least batch_size] int32, updated
    out_clamped_positions: torch.Tensor,  # [batch_size] int64, written; may be positions itself
    out_slot_mapping: torch.Tensor,  # [input_batch_size] int64, written
    block_size: int,
    max_model_len: int,
    n_blocks_per_req: int,
    PAD_ID: int,  # noqa: N803 (the Triton kernel's name)
    batch_size: int,
) -> None:
    """Move each request on by one draft token, as ``eagle_step_slot_mapping_metadata_kernel`` does.

    A request that has reached `max_model_len` continues at position 0 with a length of 1 and
    without a slot. Rows of graph padding after `batch_size` get no slot either.
    """
    del block_table_stride
    slots = out_slot_mapping[:batch_size]
    clamped_positions = torch.add(positions[:batch_size], 1, out=out_clamped_positions[:batch_size])
    exceeds_max = clamped_positions >= max_model_len  # [batch_size]
    clamped_positions.masked_fill_(exceeds_max, 0)
    block_numbers = clamped_positions // block_size
    if n_blocks_per_req * block_size < max_model_len:
        block_numbers.clamp_(max=n_blocks_per_req - 1)
    block_ids = block_table[:batch_size].gather(1, block_numbers[:, None]).squeeze(1)
    torch.add(clamped_positions % block_size, block_ids, alpha=block_size, out=slots)
    slots.masked_fill_(exceeds_max, PAD_ID)
    if len(out_slot_mapping) > batch_size:
        out_slot_mapping[batch_size:].fill_(PAD_ID)
    seq_lens[:batch_size].add_(1).clamp_(max=max_model_len).masked_fill_(exceeds_max, 1)


def eagle_prepare_inputs_padded(
    cu_num_draft_tokens: torch.Tensor,  # [num_reqs] int32
    valid_sampled_tokens_count: torch.Tensor,  # [num_reqs] int32
    query_start_loc_gpu: torch.Tensor,  # [num_reqs + 1] int32
    token_indices_to_sample: torch.Tensor,  # [num_reqs] int32, written
    num_rejected_tokens_gpu: torch.Tensor,  # [num_reqs] int32, written
    num_reqs: int,
) -> None:
    """Find each request's last token not rejected: ``eagle_prepare_inputs_padded_kernel``."""
    num_drafts = cu_num_draft_tokens[:num_reqs].clone()
    num_drafts[1:].sub_(cu_num_draft_tokens[: num_reqs - 1])
    has_drafts = num_drafts.clamp(max=1)  # 0 or 1
    # has_drafts * (num_drafts + 1 - valid): requests without drafts have nothing to reject
    num_rejected_tokens = torch.addcmul(
        num_drafts.add_(has_drafts),
        has_drafts,
        valid_sampled_tokens_count[:num_reqs],
        value=-1,
        out=num_rejected_tokens_gpu[:num_reqs],
    )
    last_tokens = token_indices_to_sample[:num_reqs]
    torch.sub(query_start_loc_gpu[1 : num_reqs + 1], num_rejected_tokens, out=last_tokens)
    last_tokens.sub_(1)


def eagle_prepare_next_token_padded(
    sampled_token_ids: torch.Tensor,  # [num_reqs, num_sampled_tokens_per_req], -1 where rejected
    discard_request_mask: torch.Tensor,  # [at least num_reqs] bool
    backup_next_token_ids: torch.Tensor,  # [at least num_reqs] int32
    next_token_ids: torch.Tensor,  # [num_reqs] int32, written
    valid_sampled_tokens_count: torch.Tensor,  # [num_reqs] int32, written
    vocab_size: int,
    num_sampled_tokens_per_req: int,
    num_reqs: int,
    stride_sampled_token_ids: int,
    BLOCK_SIZE_TOKENS: int,  # noqa: N803
) -> None:
    """Choose each request's last valid sample, or its backup if it has none.

    This is ``eagle_prepare_next_token_padded_kernel``. All samples of a discarded request are
    invalid.
    """
    del stride_sampled_token_ids, BLOCK_SIZE_TOKENS
    tokens = sampled_token_ids[:num_reqs, :num_sampled_tokens_per_req]
    is_valid = tokens == tokens.clamp(min=0, max=vocab_size - 1)  # -1 is no token
    is_valid.masked_fill_(discard_request_mask[:num_reqs, None], False)
    torch.sum(is_valid, 1, dtype=torch.int32, out=valid_sampled_tokens_count[:num_reqs])
    places = torch.arange(1, num_sampled_tokens_per_req + 1, device=tokens.device)
    last_valid = (is_valid * places).amax(1, keepdim=True)  # [num_reqs, 1], 0: none is valid
    choices = torch.cat((backup_next_token_ids[:num_reqs, None], tokens), 1)
    torch.gather(choices, 1, last_valid, out=next_token_ids[:num_reqs, None])


def copy_and_expand_eagle_inputs(
    target_token_ids: torch.Tensor,  # [total_input_tokens]
    target_positions: torch.Tensor,  # [total_input_tokens] int64
    next_token_ids: torch.Tensor,  # [num_reqs]
    out_input_ids: torch.Tensor,  # [at least num_output_tokens] int32, written
    out_positions: torch.Tensor,  # [at least num_output_tokens] int64, written
    out_is_rejected_token_mask: torch.Tensor,  # [at least num_output_tokens] bool, written
    out_is_masked_token_mask: torch.Tensor,  # [at least num_output_tokens] bool, written
    out_new_token_indices: torch.Tensor,  # [num_reqs * num_padding_slots_per_request], written
    out_hidden_state_mapping: torch.Tensor,  # [total_input_tokens], written if shift_input_ids
    query_start_loc: torch.Tensor,  # [num_reqs + 1] int32, the last is total_input_tokens
    query_end_loc: torch.Tensor,  # [num_reqs] int32, each request's last token not rejected
    padding_token_id: int,
    parallel_drafting_token_id: int,
    total_input_tokens: int,
    num_padding_slots_per_request: int,
    shift_input_ids: bool,
    BLOCK_SIZE_TOKENS: int,  # noqa: N803
) -> None:
    """Make room for new tokens after each request's own: ``copy_and_expand_eagle_inputs_kernel``.

    A request's output is its valid tokens (without the first, if shifted), the sampled token,
    places for tokens that are drafted in parallel, and padding for rejected tokens. Positions count
    up from that of the first token. Each request has `added` tokens more than before.
    """
    del BLOCK_SIZE_TOKENS
    num_reqs, device = len(query_end_loc), query_end_loc.device
    num_slots, input_offset = num_padding_slots_per_request, int(shift_input_ids)
    added = num_slots - input_offset
    num_output_tokens = total_input_tokens + num_reqs * added
    query_start = query_start_loc[:num_reqs]
    query_lens = query_start_loc[1 : num_reqs + 1] - query_start  # [num_reqs]
    requests = torch.arange(num_reqs, device=device)  # a request's rows move by `added` more
    new_tokens = torch.add(query_end_loc, requests, alpha=added)  # [num_reqs]
    if not shift_input_ids:
        new_tokens.add_(1)

    rows = torch.arange(num_output_tokens, device=device)  # [num_output_tokens], as all below
    req_indices = torch.repeat_interleave(query_lens + added, output_size=num_output_tokens)
    offsets = rows - new_tokens[req_indices]  # 0: the sample; then num_slots - 1 parallel drafts
    is_rejected = torch.ge(offsets, num_slots, out=out_is_rejected_token_mask[:num_output_tokens])
    sources = torch.sub(rows, req_indices, alpha=added)  # less `input_offset`
    token_ids = out_input_ids[:num_output_tokens]
    shifted = target_token_ids[min(input_offset, total_input_tokens - 1) :]
    torch.index_select(shifted, 0, sources.clamp(max=len(shifted) - 1), out=token_ids)
    token_ids[new_tokens] = next_token_ids
    token_ids.masked_fill_(is_rejected, padding_token_id)
    is_masked = out_is_masked_token_mask[:num_output_tokens]
    if num_slots == 1:  # no drafts in parallel
        is_masked.fill_(False)
    else:
        torch.logical_and(offsets > 0, ~is_rejected, out=is_masked)
        token_ids.masked_fill_(is_masked, parallel_drafting_token_id)
    row_0 = target_positions[query_start] - query_start  # less the moves of the request's rows
    positions = torch.add(row_0[req_indices], sources, out=out_positions[:num_output_tokens])
    positions.masked_fill_(is_rejected, 0)
    if num_slots > 1:
        new_tokens = new_tokens[:, None] + torch.arange(num_slots, device=device)
    out_new_token_indices[: num_reqs * num_slots] = new_tokens.flatten()
    if shift_input_ids:  # the drafter takes hidden states
        req_indices = torch.repeat_interleave(query_lens, output_size=total_input_tokens)
        out_hidden_state_mapping[:total_input_tokens] = torch.add(
            rows[:total_input_tokens], req_indices, alpha=added
        )
