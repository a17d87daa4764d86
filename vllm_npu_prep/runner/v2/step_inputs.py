"""A prepared step in the form that upstream's V2 code reads."""

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import BatchReqState

from vllm_npu_prep.device.staging import StagedArrays
from vllm_npu_prep.prep.padding import GraphMode
from vllm_npu_prep.runner.step import StepInFlight
from vllm_npu_prep.runner.v2.verification import VerifiedBatch


class StepInputs:
    """Makes upstream's ``InputBatch`` of a prepared step, from views of its arrays and constants.

    With `always_masks`, steps without padding have a padding mask, too, because experts that see
    tokens of other ranks need a mask of every rank.
    """

    def __init__(
        self, max_num_reqs: int, device: torch.device, *, always_masks: bool = False
    ) -> None:
        self._always_masks = always_masks
        self._one_each = torch.arange(max_num_reqs + 1, dtype=torch.int32, device=device)
        # Without a stride, by which kernels see that no row has drafts before it
        self._no_positions = torch.zeros(1, dtype=torch.int32, device=device).expand(max_num_reqs)
        self._logit_borders = np.arange(max_num_reqs + 1, dtype=np.int32)
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by number of requests
        # The batch of which these inputs are, and the inputs by the buffers that they view
        self._now: BatchReqState | None = None
        self._inputs: dict[StagedArrays, InputBatch] = {}

    def of_step(self, now: BatchReqState, in_flight: StepInFlight, structured: bool) -> InputBatch:
        """Return the step for the model, with padding, and for the sampler, without.

        Steps of the same batch in the same buffer get the same object, which is made once: it has
        more than thirty fields. `structured` says whether a request of the step has a grammar.
        """
        step, staged = in_flight.step, in_flight.staged
        if now is not self._now:
            self._now, self._inputs = now, {}
        batch = self._inputs.get(staged)
        if batch is None:
            batch = self._inputs[staged] = self._make(now, in_flight)
        has_mask = step.padding.mode is not GraphMode.NONE or self._always_masks
        # Without a graph nothing is padded
        batch.is_padding = staged.device.is_padding if has_mask else None  # type: ignore[assignment]
        batch.has_structured_output_reqs = structured
        return batch.of(step, staged.device) if isinstance(batch, VerifiedBatch) else batch

    def _make(self, now: BatchReqState, in_flight: StepInFlight) -> InputBatch:
        step, staged = in_flight.step, in_flight.staged
        arrays, padding, num_logits = staged.device, step.padding, step.num_logits
        num_reqs, num_tokens = now.idx_mapping_np.shape[0], now.num_tokens
        idx_mapping, seq_lens, on_host = arrays.idx_mapping, arrays.seq_lens, staged.cpu.seq_lens
        if num_reqs < padding.num_reqs_padded:  # each view takes a microsecond
            idx_mapping, seq_lens = idx_mapping[:num_reqs], seq_lens[:num_reqs]
            on_host = on_host[:num_reqs]
        # A slice where each token has a row of logits, so that nothing is gathered
        logits_indices: Any = slice(num_logits)
        if num_logits < num_tokens:
            logits_indices = arrays.logits_indices
            if num_logits < logits_indices.shape[0]:
                logits_indices = logits_indices[:num_logits]
        drafts: np.ndarray | None = None
        num_drafts = num_logits - num_reqs
        if num_drafts:
            drafts = step.batch.num_draft_tokens[:num_reqs]
        no_positions, one_each = self._of_size(num_reqs)
        kind = InputBatch if drafts is None else VerifiedBatch
        return kind(
            req_ids=now.req_ids,
            num_reqs=num_reqs,
            num_reqs_after_padding=padding.num_reqs_padded,
            idx_mapping=idx_mapping,
            idx_mapping_np=now.idx_mapping_np,
            expanded_idx_mapping=idx_mapping,
            num_scheduled_tokens=now.num_scheduled_tokens,
            num_tokens=num_tokens,
            num_tokens_after_padding=padding.num_input_tokens,
            num_draft_tokens=num_drafts,
            num_draft_tokens_per_req=drafts,
            query_start_loc=arrays.query_start_loc,
            query_start_loc_np=staged.np.query_start_loc,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=on_host,
            num_computed_tokens_np=staged.np.num_computed_tokens[:num_reqs],
            prefill_len_np=now.prefill_len_np,
            num_computed_prefill_tokens_np=now.num_computed_prefill_tokens_np,
            is_prefilling_np=now.is_prefilling_np,
            has_prefill=now.has_prefill,
            decode_graph_eligible=now.decode_graph_eligible,
            input_ids=arrays.input_ids,
            positions=arrays.positions,
            is_padding=arrays.is_padding,  # or None: `of_step` decides
            logits_indices=logits_indices,
            cu_num_logits_np=self._logit_borders[: num_reqs + 1],
            has_structured_output_reqs=False,  # so does it here
            expanded_local_pos=no_positions,
            dcp_local_seq_lens=None,
            cu_num_logits=one_each,
            prompt_lens=None,
        )

    def _of_size(self, num_reqs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places and the borders of rows of logits for this number of requests without
        drafts; they are made once."""
        if num_reqs not in self._kept:
            self._kept[num_reqs] = self._no_positions[:num_reqs], self._one_each[: num_reqs + 1]
        return self._kept[num_reqs]
