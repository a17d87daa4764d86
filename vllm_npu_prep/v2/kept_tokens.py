"""Samples where upstream's sampler looks for them, and log-probabilities of prompts."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_npu_prep.v2.states import SlotStates


def reads_tokens(params: SamplingParams | None) -> bool:
    """Whether a request's parameters make the sampler read its tokens on the device."""
    return params is not None and (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or bool(params.bad_words_token_ids)
        or params.prompt_logprobs is not None
    )


def note_samples(
    sampler: Sampler,
    states: SlotStates,
    batch: InputBatch,
    sampled: torch.Tensor,  # [num_reqs] int64
    discard: torch.Tensor,  # [num_reqs] bool
) -> None:
    """Enter a step's samples for penalties and bad words, if a request of the step has some."""
    slots, penalties = batch.idx_mapping_np, sampler.penalties_state
    _, _, bad_words = sampler.logits_processors[:3]
    wants_counts = penalties.use_penalty[slots].any()
    wants_tokens = bad_words.num_bad_words.np[slots].any()  # type: ignore[attr-defined]
    if not (wants_counts or wants_tokens):
        return
    idx_mapping = batch.idx_mapping
    is_kept = (~discard).to(torch.int32)
    if wants_counts:
        counts = penalties.output_bin_counts
        counts.index_put_((idx_mapping, sampled), is_kept, accumulate=True)
    if wants_tokens:
        last = states.max_model_len - 1
        places = idx_mapping, batch.seq_lens.clamp(max=last).long()
        tokens = states.all_token_ids.gpu
        there = torch.where(discard, tokens[places], sampled.to(torch.int32))
        tokens.index_put_(places, there)
        states.total_len.gpu.index_add_(0, idx_mapping, is_kept)


def score_prompts(
    worker: PromptLogprobsWorker,
    states: SlotStates,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    hidden_states: torch.Tensor,  # [num_tokens or more, hidden_size]
    batch: InputBatch,
) -> dict[str, Any]:
    """Log-probabilities of prompts, for requests of the step that want some."""
    return worker.compute_prompt_logprobs(
        compute_logits,
        hidden_states,
        batch,
        states.all_token_ids.gpu,
        states.num_computed_tokens.copy_to_uva(),
        states.prompt_len.np,
    )
