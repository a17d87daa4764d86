"""Allowed tokens, biases and stop tokens of requests on V2, in lists of any length.

Upstream's V2 has a row of fixed length for each list, and its runner raises if a list is longer,
which would end the engine and all its requests. Requests with such a list have tables of the whole
vocabulary instead.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample.logit_bias import (
    MAX_NUM_ALLOWED_TOKEN_IDS,
    MAX_NUM_LOGIT_BIAS_TOKENS,
    MAX_NUM_STOP_TOKEN_IDS,
    LogitBiasState,
)
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

from vllm_npu_prep.ops.triton.sampling_v2 import INFINITY, forbid_stops


class LongLists:
    """What a request with a long list allows, prefers and may not end with."""

    def __init__(
        self, params: SamplingParams, prompt_len: int, vocab_size: int, device: torch.device
    ) -> None:
        def marked(tokens: Iterable[int]) -> torch.Tensor:
            marks = np.zeros(vocab_size, bool)
            marks[[token for token in set(tokens) if 0 <= token < vocab_size]] = True
            return async_tensor_h2d(marks, device=device)

        # Each [vocab_size]; None if the request has no such list
        self.allowed = marked(params.allowed_token_ids) if params.allowed_token_ids else None
        self.bias: torch.Tensor | None = None
        if params.logit_bias:
            bias = np.zeros(vocab_size, np.float32)
            bias[[*params.logit_bias]] = [*params.logit_bias.values()]
            self.bias = async_tensor_h2d(bias, device=device)
        self.stops: torch.Tensor | None = None
        if params.min_tokens and params.all_stop_token_ids:
            self.stops = marked(params.all_stop_token_ids)
        self.min_len = prompt_len + params.min_tokens
        self.may_restore = params.structured_outputs is not None

    def apply(self, logits: torch.Tensor, is_own: torch.Tensor, pos: torch.Tensor) -> None:
        """Change the request's rows of logits.

        `logits` are float32 ``[num_logits, vocab_size]``, `is_own`, bool ``[num_logits]``, says
        which rows are the request's, and `pos`, int64 ``[num_logits]``, their positions.
        """
        if self.allowed is not None:
            logits.masked_fill_(is_own[:, None] & ~self.allowed, -INFINITY)
        if self.bias is not None:
            logits.add_(torch.where(is_own[:, None], self.bias, 0.0))
        if self.stops is not None:
            is_short = is_own & (pos + 1 < self.min_len)
            stops = is_short[:, None] & self.stops
            forbid_stops(logits, stops, is_own if self.may_restore else None)


class NPULogitBiasState(LogitBiasState):
    """Upstream's state, and the requests with lists that are longer than its rows."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        super().__init__(vllm_config, req_states)
        self._device, self._vocab_size = req_states.device, req_states.vocab_size
        self._long: dict[int, LongLists] = {}  # by request row

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self._long.pop(req_idx, None)  # of the row's last request
        if not has_long_lists(sampling_params):
            has_lists: bool = super().add_request(req_idx, sampling_params)
            return has_lists
        super().add_request(req_idx, SamplingParams())
        prompt_len = int(self.prompt_len_np[req_idx])
        given = sampling_params, prompt_len, self._vocab_size, self._device
        self._long[req_idx] = LongLists(*given)
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        logits = super().apply(logits, ctx)
        for row, lists in self._long.items():
            if row in ctx.idx_mapping_np:
                lists.apply(logits, ctx.expanded_idx_mapping == row, ctx.pos)
        return logits


def has_long_lists(params: SamplingParams) -> bool:
    """Tell whether upstream has no room for a list of a request."""
    stops = params.all_stop_token_ids if params.min_tokens else ()
    return (
        len(params.allowed_token_ids or ()) > MAX_NUM_ALLOWED_TOKEN_IDS
        or len(params.logit_bias or ()) > MAX_NUM_LOGIT_BIAS_TOKENS
        or len(stops) > MAX_NUM_STOP_TOKEN_IDS
    )
