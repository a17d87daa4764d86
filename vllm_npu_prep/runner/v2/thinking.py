"""Budgets of thinking tokens, by request row."""

from typing import TYPE_CHECKING, Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState

from vllm_npu_prep.ops.triton.thinking import Markers, end_thinking, note_markers
from vllm_npu_prep.runner.v2.buffers import RowValues, StagedRows
from vllm_npu_prep.runner.v2.request_states import NPURequestState

if TYPE_CHECKING:
    from vllm.config.reasoning import ReasoningConfig


class NPUThinkingBudgetState(ThinkingBudgetState):
    """Upstream's state without Triton: it counts on the device, where samples and drafts are.

    So no step waits for the host, neither asynchronous steps nor steps with drafts. The host finds
    the markers in the tokens with which a request arrives, because it knows these.
    """

    req_states: NPURequestState  # type: ignore[assignment]
    thinking_token_budget: RowValues  # type: ignore[assignment]

    def __init__(self, req_states: Any, reasoning_config: "ReasoningConfig | None") -> None:
        super().__init__(req_states, reasoning_config)
        if not self.enabled:
            return
        assert reasoning_config is not None
        self._markers = Markers(
            reasoning_config.reasoning_start_token_ids or (),
            reasoning_config.natural_reasoning_end_token_ids or (),
            reasoning_config.reasoning_end_token_ids or (),
        )
        # [max_num_reqs, 2] int32: places of each request's last start and last end
        self._last = StagedRows((req_states.max_num_reqs, 2), torch.int32, req_states.device)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        has_budget: bool = super().add_request(req_idx, sampling_params)
        if has_budget:
            token_ids = self.req_states.ids_at_arrival(req_idx)
            self._last.stage_write(req_idx, 0, self._markers.last_of(token_ids))
        return has_budget

    def apply_staged_writes(self) -> None:
        if self.enabled:
            self._reset_reqs.clear()  # upstream's own markers use it
            self._last.apply_write()
            self.thinking_token_budget.copy_to_uva()

    def apply(self, logits: torch.Tensor, ctx: Any) -> None:
        """Force the end of thinking in rows of requests whose budget is used up.

        `logits`, float32 ``[num_logits, vocab_size]``, are changed in place; `ctx` is upstream's
        ``LogitsContext``.
        """
        if not self.enabled or not self.use_thinking_budget[ctx.idx_mapping_np].any():
            return
        states, drafts = self.req_states, self.req_states.num_speculative_steps
        tokens = states.all_token_ids.gpu, states.total_len.gpu
        note_markers(self._last.gpu, ctx.idx_mapping, *tokens, self._markers, 1 + drafts)
        end_thinking(
            logits,
            ctx.expanded_idx_mapping,
            self.thinking_token_budget.gpu,
            self._last.gpu,
            *tokens,
            ctx.input_ids,
            ctx.expanded_local_pos,
            self._markers,
            drafts,
        )
