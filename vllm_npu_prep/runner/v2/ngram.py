"""Drafts that the V2 runner looks up in a request's own tokens (prompt lookup)."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_npu_prep.runner.v2.request_states import NPURequestState
from vllm_npu_prep.runner.v2.verification import AcceptedCounts


class NPUNgramSpeculator(BaseSpeculator):
    """Drafts the tokens that followed the last tokens when these occurred before.

    It stands in for upstream's ``NgramGPUSpeculator``, which launches two Triton kernels. Tokens
    stay on the device, and the host waits for nothing. `states` have to keep all tokens there
    (`NPURequestState.keeps_all_tokens`).
    """

    supports_mm_inputs = False
    draft_logits = None

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, states: NPURequestState
    ) -> None:
        config = vllm_config.speculative_config
        assert config is not None
        assert config.prompt_lookup_min is not None and config.prompt_lookup_max is not None
        self._sizes = config.prompt_lookup_min, config.prompt_lookup_max
        self._num_drafts, self._states = config.num_speculative_tokens, states
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self._no_drafts = torch.zeros(
            max_num_reqs, self._num_drafts, dtype=torch.int32, device=device
        )

    def init_cudagraph_manager(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no model."""

    def capture(self) -> None:
        """Do nothing: there is no model."""

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return zeros in a dummy run, where there is nothing to look up."""
        return self._no_drafts[: input_batch.num_reqs]

    def draft(
        self, idx_mapping: torch.Tensor, accepted: AcceptedCounts, most_known: int
    ) -> torch.Tensor:
        """Draft tokens, int32 ``[num_reqs, num_speculative_tokens]``, after a step's samples.

        `NPURequestState` has the samples already. `idx_mapping`, int64 ``[num_reqs]``, are request
        rows. No request has more than `most_known` tokens, so later columns are not read.
        """
        tokens = self._states.all_token_ids.gpu[:, :most_known].index_select(0, idx_mapping)
        lengths = self._states.total_len.gpu.index_select(0, idx_mapping)
        lengths = lengths.masked_fill(accepted.num_valid_tokens == 0, 0)
        return look_up(tokens, lengths, accepted.next_token_ids, *self._sizes, self._num_drafts)


def look_up(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    last: torch.Tensor,
    smallest: int,
    largest: int,
    num_drafts: int,
) -> torch.Tensor:
    """Return the tokens that followed the last place where a request's last tokens occurred before.

    They are int32 ``[num_reqs, num_drafts]``. The longest match counts, and of its places the last
    one, as in upstream's ``_ngram_scan_kernel`` and ``_ngram_finalize_kernel``.

    Parameters
    ----------
    tokens
        int32 ``[num_reqs, width]``.
    lengths
        int32 ``[num_reqs]``: the number of known tokens, at most `width`. A request with 0 gets
        `last` as its drafts.
    last
        int32 ``[num_reqs]``: the token that is drafted where nothing is found.
    smallest, largest
        How many last tokens have to match: at least, and at most.
    """
    width, device = tokens.shape[1], tokens.device
    lengths = lengths.long()[:, None]
    places = torch.arange(width, device=device)
    start = torch.zeros_like(lengths)  # [num_reqs, 1]: the token after the place; 0: none
    following = torch.nn.functional.pad(tokens, (0, largest))
    for size in range(smallest, largest + 1):
        ends = (lengths - size + torch.arange(size, device=device)).clamp(min=0, max=width - 1)
        wanted = tokens.gather(1, ends)
        is_found = places < lengths - size
        for index in range(size):
            is_found &= following[:, index : index + width] == wanted[:, index, None]
        place = (is_found * (places + 1)).amax(1, keepdim=True)  # 0: none
        start = torch.where(place > 0, place - 1 + size, start)
    at = start + torch.arange(num_drafts, device=device)
    drafts = tokens.gather(1, at.clamp(max=width - 1))
    return torch.where((start > 0) & (at < lengths), drafts, last[:, None])
