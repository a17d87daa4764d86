"""A prepared step in the form that upstream's V2 code reads."""

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import BatchReqState

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

    def of_step(self, now: BatchReqState, in_flight: StepInFlight, structured: bool) -> InputBatch:
        """Return the step for the model, with padding, and for the sampler, without.

        `structured` says whether a request of the step has a grammar.
        """
        step, staged = in_flight.step, in_flight.staged
        arrays, num_reqs = staged.device, step.num_reqs
        rows = slice(num_reqs) if num_reqs < step.padding.num_reqs_padded else None
        idx_mapping = _leading(arrays.idx_mapping, rows)
        has_mask = step.padding.mode is not GraphMode.NONE or self._always_masks
        logits_indices, num_logits = arrays.logits_indices, step.num_logits
        if num_logits < len(logits_indices):
            logits_indices = logits_indices[:num_logits]
        drafts: np.ndarray | None = None
        borders = self._logit_borders[: num_reqs + 1]
        if step.num_drafts:
            drafts = step.batch.num_draft_tokens[:num_reqs]
            borders = np.concatenate((borders[:1], np.cumsum(drafts + 1, dtype=np.int32)))
        kind = InputBatch if drafts is None else VerifiedBatch
        batch = kind(
            req_ids=now.req_ids,
            num_reqs=num_reqs,
            num_reqs_after_padding=step.padding.num_reqs_padded,
            idx_mapping=idx_mapping,
            idx_mapping_np=now.idx_mapping_np,
            expanded_idx_mapping=idx_mapping,
            expanded_local_pos=self._no_positions[:num_reqs],
            num_scheduled_tokens=now.num_scheduled_tokens,
            num_tokens=now.num_tokens,
            num_tokens_after_padding=step.num_input_tokens,
            num_draft_tokens=step.num_drafts,
            num_draft_tokens_per_req=drafts,
            query_start_loc=arrays.query_start_loc,
            query_start_loc_np=staged.np.query_start_loc,
            seq_lens=_leading(arrays.seq_lens, rows),
            seq_lens_cpu_upper_bound=_leading(staged.cpu.seq_lens, rows),
            dcp_local_seq_lens=None,
            num_computed_tokens_np=step.num_computed_tokens,
            prefill_len_np=now.prefill_len_np,
            num_computed_prefill_tokens_np=now.num_computed_prefill_tokens_np,
            is_prefilling_np=now.is_prefilling_np,
            has_prefill=now.has_prefill,
            decode_graph_eligible=now.decode_graph_eligible,
            input_ids=arrays.input_ids,
            positions=arrays.positions,
            # Without a graph nothing is padded
            is_padding=arrays.is_padding if has_mask else None,  # type: ignore[arg-type]
            logits_indices=logits_indices,
            cu_num_logits=self._one_each[: num_reqs + 1],
            cu_num_logits_np=borders,
            has_structured_output_reqs=structured,
            prompt_lens=None,
        )
        return batch.of(step, arrays) if isinstance(batch, VerifiedBatch) else batch


def _leading(array: torch.Tensor, rows: slice | None) -> torch.Tensor:
    """Return the rows of real requests: `array` itself if nothing is padded, as a view takes a
    microsecond."""
    return array if rows is None else array[rows]
