"""Samples written where upstream's sampler reads them."""

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_npu_prep.runner.v2.request_states import NPURequestState


def reads_tokens(params: SamplingParams | None) -> bool:
    """Return whether a request's parameters make the sampler read its tokens on the device."""
    return params is not None and (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or bool(params.bad_words_token_ids)
        or params.prompt_logprobs is not None
        or params.thinking_token_budget is not None
    )


def note_samples(
    sampler: Sampler,
    states: NPURequestState,
    batch: InputBatch,
    sampled: torch.Tensor,  # [num_reqs, width] int64, -1 after a request's last token
    discard: torch.Tensor,  # [num_reqs or more] bool
) -> None:
    """Write a step's samples to the device's tables, if a request of the step needs them there.

    Penalties read counts of tokens. Bad words, budgets of thinking tokens, and drafts that are
    looked up read the tokens themselves.
    """
    if not states.readers:
        return
    request_rows, penalties = batch.idx_mapping_np, sampler.penalties_state
    _, _, bad_words = sampler.logits_processors[:3]
    wants_counts = penalties.use_penalty[request_rows].any()
    with_words = bad_words.num_bad_words.np[request_rows]  # type: ignore[attr-defined]
    with_budgets = sampler.thinking_budget_state
    wants_tokens = states.keeps_all_tokens or with_words.any()
    if with_budgets.enabled:
        wants_tokens = wants_tokens or with_budgets.use_thinking_budget[request_rows].any()
    if not (wants_counts or wants_tokens):
        return
    idx_mapping, width = batch.idx_mapping, sampled.shape[1]
    first = batch.seq_lens  # the place of the first sample
    is_discarded = discard[: batch.num_reqs, None]
    if width > 1:
        borders = batch.cu_num_logits
        first = first - (borders[1:] - borders[:-1] - 1)
        is_discarded = is_discarded | (sampled < 0)
        sampled = sampled.clamp(min=0)
    slot_of = idx_mapping[:, None].expand_as(sampled)
    is_kept = (~is_discarded).to(torch.int32)
    if wants_counts:
        counts = penalties.output_bin_counts
        counts.index_put_((slot_of, sampled), is_kept, accumulate=True)
    if wants_tokens:
        at = first[:, None] + torch.arange(width, device=first.device)
        places = slot_of, at.clamp(max=states.max_model_len - 1).long()
        tokens = states.all_token_ids.gpu
        there = torch.where(is_discarded, tokens[places], sampled.to(torch.int32))
        tokens.index_put_(places, there)
        states.total_len.gpu.index_add_(0, idx_mapping, is_kept.sum(1, dtype=torch.int32))
