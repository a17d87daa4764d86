"""Appends sampled tokens after a step, for many requests at once.

Upstream does it one request at a time, with several numpy scalars each. Here ordinary requests are
handled together, drafts included; all others go to upstream's own method.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from vllm import envs
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu_input_batch import InputBatch

from vllm_npu_prep.prep.bookkeeping import append_sampled_tokens, append_verified_tokens
from vllm_npu_prep.runner.v1.request_updates import PLACEHOLDER


class Bookkeeping:
    """Appends samples of plain requests to upstream's input batch together.

    Parameters
    ----------
    asynchronous
        True if samples are still on the device when they are appended (asynchronous scheduling).
    read_back
        Copies samples, int ``[num_reqs, 1]``, to `samples_np` and returns them as lists. It waits
        for the device.
    samples_np
        int64 ``[max_num_reqs, 1]`` on the host.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        *,
        asynchronous: bool,
        read_back: Callable[[torch.Tensor], list[list[int]]],
        samples_np: np.ndarray,
    ) -> None:
        self.max_model_len, self.asynchronous = max_model_len, asynchronous
        self._read_back, self._samples_np = read_back, samples_np
        self._placeholders = np.full(max_num_reqs, PLACEHOLDER, np.int64)
        self._counts_nans = bool(envs.VLLM_COMPUTE_NANS_IN_LOGITS)

    def can_append_together(
        self,
        batch: InputBatch,
        sampler_output: SamplerOutput,
        discard: np.ndarray,  # bool [num_reqs]: the requests whose sample does not count
        # The requests that want log-probabilities of their prompt
        num_prompt_logprobs: Mapping[str, int],
    ) -> bool:
        """Return whether tokens are all that each request got and needs.

        Upstream handles the other cases: log-probabilities of prompts or beside drafts, generators
        whose sample is discarded, and counts of NaNs.
        """
        num_rows, width = sampler_output.sampled_token_ids.shape
        if num_rows != batch.num_reqs or num_prompt_logprobs or self._counts_nans:
            return False
        if batch.generators and discard.any():
            return False
        if self.asynchronous:
            return width == 1 or batch.prev_sampled_token_ids is not None
        return width == 1 or sampler_output.logprobs_tensors is None

    def append_sampled_tokens(
        self, batch: InputBatch, sampler_output: SamplerOutput, discard: np.ndarray
    ) -> tuple[Any, ...]:
        """Append sampled tokens, or placeholders for tokens that are still on the device.

        The arguments are those of `can_append_together`. It returns what upstream's
        ``_bookkeeping_sync`` returns.

        Raises
        ------
        AssertionError
            If a request has no room for its tokens, as upstream does.
        """
        sampled = sampler_output.sampled_token_ids
        req_ids, req_id_to_index = batch.req_ids.copy(), batch.req_id_to_index.copy()
        discarded: list[int] = np.flatnonzero(discard).tolist()
        tokens: list[list[int]] = []
        logprobs, invalid = None, []
        if self.asynchronous:
            full, invalid = self._append_placeholders(batch, sampled, discard, discarded), discarded
        elif sampled.shape[1] > 1:
            full, tokens = self._append_verified(batch, sampled, discard)
        else:
            full, tokens = self._append_samples(batch, sampled, discard, discarded)
            if sampler_output.logprobs_tensors is not None:
                logprobs = sampler_output.logprobs_tensors.tolists()
        assert full < 0, (
            f"request {req_ids[full]} has no room for its sample: it may hold "
            f"max_model_len={self.max_model_len} tokens"
        )
        return {}, None, logprobs, tokens, {}, req_ids, req_id_to_index, invalid

    def _append_placeholders(
        self, batch: InputBatch, sampled: torch.Tensor, discard: np.ndarray, discarded: list[int]
    ) -> int:
        """Append one placeholder for each request, however many drafts it had.

        The next step continues from the samples that drafters have set, or else from these. It
        returns what `_append_one` returns.
        """
        rows = batch.req_id_to_index.copy()
        for row in discarded:
            del rows[batch.req_ids[row]]
        if batch.prev_sampled_token_ids is None:
            batch.prev_sampled_token_ids = sampled
        batch.prev_req_id_to_index = rows
        outputs: list[Any] = batch.req_output_token_ids  # the lists that `CachedRequestState` holds
        for row in rows.values():
            outputs[row].append(PLACEHOLDER)
        return self._append_one(batch, self._placeholders[: len(sampled)], discard)

    def _append_samples(
        self, batch: InputBatch, sampled: torch.Tensor, discard: np.ndarray, discarded: list[int]
    ) -> tuple[int, list[list[int]]]:
        tokens = self._read_back(sampled)
        for row in discarded:
            tokens[row].clear()
        self._extend_outputs(batch, tokens)
        return self._append_one(batch, self._samples_np[: len(sampled), 0], discard), tokens

    def _append_one(self, batch: InputBatch, tokens: np.ndarray, discard: np.ndarray) -> int:
        """Write one token for each request that is not discarded into its row.

        It returns the first row that has no room for its token, -1 if all have room.
        """
        return append_sampled_tokens(
            tokens, discard, batch.num_tokens_no_spec, batch.token_ids_cpu, batch.is_token_ids
        )

    def _append_verified(
        self, batch: InputBatch, sampled: torch.Tensor, discard: np.ndarray
    ) -> tuple[int, list[list[int]]]:
        flat = np.empty(sampled.numel(), np.int32)
        ends = np.zeros(len(sampled) + 1, np.int32)
        full = append_verified_tokens(
            sampled.to(torch.int32).cpu().numpy(),
            discard,
            batch.vocab_size,
            batch.num_tokens_no_spec,
            batch.token_ids_cpu,
            batch.is_token_ids,
            flat,
            ends,
        )
        kept = flat[: ends[-1]].tolist()
        tokens = [kept[start:end] for start, end in pairwise(ends.tolist())]
        if full < 0:
            self._extend_outputs(batch, tokens)
        return full, tokens

    def _extend_outputs(self, batch: InputBatch, tokens: list[list[int]]) -> None:
        outputs: list[Any] = batch.req_output_token_ids  # the lists that `CachedRequestState` holds
        for output_token_ids, new_token_ids in zip(outputs, tokens):
            output_token_ids.extend(new_token_ids)
