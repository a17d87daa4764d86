"""A prepared step in the form that upstream's V2 code reads."""

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import BatchReqState

from vllm_npu_prep.device.staging import CACHED_LAYOUTS, StagedArrays
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
        # By the buffer that they view: the inputs of its last step, and their batch
        self._inputs: dict[StagedArrays, tuple[InputBatch, BatchReqState]] = {}

    def of_step(
        self, requests: BatchReqState, in_flight: StepInFlight, structured: bool
    ) -> InputBatch:
        """Return the step for the model, with padding, and for the sampler, without.

        Steps of the same sizes in the same buffer get the same object: of its more than thirty
        fields, few differ between batches. `structured` says whether a request of the step has a
        grammar.
        """
        step, staged = in_flight.step, in_flight.staged
        kept = self._inputs.get(staged)
        if kept is None or kept[1] is not requests:
            last = None if kept is None else kept[0]
            kept = self._inputs[staged] = self._of_batch(requests, in_flight, last), requests
        batch = kept[0]
        has_mask = step.padding.mode is not GraphMode.NONE or self._always_masks
        # Without a graph nothing is padded, unless ranks share prompts
        batch.is_padding = staged.device.model_is_padding if has_mask else None  # type: ignore[assignment]
        batch.has_structured_output_reqs = structured
        return batch.of(step, staged.device) if isinstance(batch, VerifiedBatch) else batch

    def _of_batch(
        self, requests: BatchReqState, in_flight: StepInFlight, last: InputBatch | None
    ) -> InputBatch:
        """Return the inputs of a batch: `last`, of the same buffer, if it has the same sizes."""
        num_reqs, num_tokens = requests.idx_mapping_np.shape[0], requests.num_tokens
        num_drafts = in_flight.step.num_logits - num_reqs
        sizes = num_reqs, num_tokens, num_drafts
        of_requests = {
            "req_ids": requests.req_ids,
            "idx_mapping_np": requests.idx_mapping_np,
            "num_scheduled_tokens": requests.num_scheduled_tokens,
            "num_draft_tokens_per_req": requests.num_draft_tokens_np if num_drafts else None,
            "prefill_len_np": requests.prefill_len_np,
            "num_computed_prefill_tokens_np": requests.num_computed_prefill_tokens_np,
            "is_prefilling_np": requests.is_prefilling_np,
            "has_prefill": requests.has_prefill,
            "decode_graph_eligible": requests.decode_graph_eligible,
        }
        if last is not None and sizes == (last.num_reqs, last.num_tokens, last.num_draft_tokens):
            vars(last).update(of_requests)
            return last
        if len(self._inputs) >= CACHED_LAYOUTS:
            self._inputs.clear()
        return self._make(in_flight, *sizes, of_requests)

    def _make(
        self,
        in_flight: StepInFlight,
        num_reqs: int,
        num_tokens: int,
        num_drafts: int,
        of_requests: dict[str, Any],
    ) -> InputBatch:
        step, staged = in_flight.step, in_flight.staged
        arrays, padding, num_logits = staged.device, step.padding, step.num_logits
        idx_mapping, seq_lens, on_host = arrays.idx_mapping, arrays.seq_lens, staged.cpu.seq_lens
        if num_reqs < padding.num_reqs_padded:  # each view takes a microsecond
            idx_mapping, seq_lens = idx_mapping[:num_reqs], seq_lens[:num_reqs]
            on_host = on_host[:num_reqs]
        # A slice where each token has a row of logits, so that nothing is gathered
        logits_indices: Any = slice(num_logits)
        if num_logits < num_tokens and not step.shape.pcp:  # with it, they alone are gathered
            logits_indices = arrays.logits_indices
            if num_logits < logits_indices.shape[0]:
                logits_indices = logits_indices[:num_logits]
        no_positions, one_each = self._of_size(num_reqs)
        kind = VerifiedBatch if num_drafts else InputBatch
        return kind(
            **of_requests,
            num_reqs=num_reqs,
            num_reqs_after_padding=padding.num_reqs_padded,
            idx_mapping=idx_mapping,
            expanded_idx_mapping=idx_mapping,
            num_tokens=num_tokens,
            num_tokens_after_padding=step.num_rank_tokens,
            num_draft_tokens=num_drafts,
            query_start_loc=arrays.query_start_loc,
            query_start_loc_np=staged.np.query_start_loc,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=on_host,
            num_computed_tokens_np=staged.np.num_computed_tokens[:num_reqs],
            input_ids=arrays.model_input_ids,
            positions=arrays.model_positions,
            is_padding=arrays.model_is_padding,  # or None: `of_step` decides
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
