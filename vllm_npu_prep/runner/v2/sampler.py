"""The sampler of vLLM's V2 runner without Triton: a step launches only what its requests need."""

from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput, SamplingMaskTensors
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_npu_prep.compat import v2
from vllm_npu_prep.ops.triton.rejection_v2 import verify_drawn_drafts
from vllm_npu_prep.runner.v2.drawing import RowsToDraw, draw, uniform
from vllm_npu_prep.runner.v2.kept_tokens import reads_tokens
from vllm_npu_prep.runner.v2.traces import NPUTraceReplayState


class SampledDrafts(NamedTuple):
    """Drafts of a step that were drawn at random, and the logits that they were drawn from.

    Attributes
    ----------
    token_ids
        int32 ``[num_drafts]``; -1 where there is none or where a grammar forbids it.
    rows
        int ``[num_drafts]``: the row of logits that verifies each draft.
    logits
        ``[max_num_reqs, num_speculative_tokens, vocab_size]`` of the drafter, by request row.
    """

    token_ids: torch.Tensor
    rows: torch.Tensor
    logits: torch.Tensor


class NPUSampler(Sampler):
    """Upstream's sampler, over upstream's states of sampling parameters.

    A greedy step is one launch, an argmax. Requests without a seed draw from torch's generator.
    Rows of requests with a seed get the noise of upstream's kernel, so that such a request gets the
    same tokens whatever it is batched with. With ``--use-fp64-gumbel`` noise is float64, as
    upstream's.
    """

    trace_replay_state: NPUTraceReplayState | None  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # By request row: parameters that were entered, if nothing else of the request matters
        self._entered: dict[int, SamplingParams] = {}
        self._is_sent = False

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Enter a request's parameters, unless its row has equal ones from the request before."""
        params = sampling_params
        # These two may have arrays, which can't be compared
        may_compare = params.prompt_logprob_token_ids is None and params.extra_args is None
        if may_compare and params == self._entered.get(req_idx):
            return
        super().add_request(req_idx, sampling_params)
        self._is_sent = False
        self._entered.pop(req_idx, None)
        processors, traces = self.logits_processors, self.trace_replay_state
        bias: Any = processors[0]
        reads = reads_tokens(params) or bias.use_logit_bias[req_idx] or params.logprob_token_ids
        if may_compare and not (reads or traces or len(processors) > 3):
            self._entered[req_idx] = params

    def apply_staged_writes(self) -> None:
        if not self._is_sent or len(self.logits_processors) > 3:
            super().apply_staged_writes()
            self._is_sent = True

    def __call__(
        self, logits: torch.Tensor, input_batch: InputBatch, drafts: SampledDrafts | None = None
    ) -> SamplerOutput:
        """Sample a token for each row of logits.

        Parameters
        ----------
        logits
            ``[num_logits, vocab_size]``: a request has a row for each of its drafts, and one after
            them.
        drafts
            Drafts that were drawn at random; None if there are none, or if they are the drafter's
            most likely tokens.

        Returns
        -------
        SamplerOutput
            Samples are int64 ``[num_logits, 1]``. The numbers of samples are None, because the host
            knows them.
        """
        request_rows, idx_mapping = input_batch.idx_mapping_np, input_batch.expanded_idx_mapping
        num_drafts = input_batch.num_draft_tokens_per_req
        rows_of_logits = request_rows if num_drafts is None else request_rows.repeat(num_drafts + 1)
        dims = self.get_logprobs_dims(request_rows)
        processed = logits
        if self.needs_logits_processing[request_rows].any():
            pos = positions_of(input_batch)
            processed = self.apply_sampling_params(
                logits,
                idx_mapping,
                input_batch.idx_mapping,
                request_rows,
                pos,
                input_batch.input_ids[input_batch.logits_indices],
                input_batch.expanded_local_pos,
                input_batch.seq_lens_cpu_upper_bound.numpy(),
                skip_top_k_top_p=True,
            )
        top_k, top_p = v2.top_k_and_top_p(
            self.sampling_states, idx_mapping, request_rows, logits.shape[-1]
        )
        if top_k is not None or top_p is not None:
            processed = apply_top_k_top_p(processed, top_k, top_p)
        requests = RowsToDraw(
            self.sampling_states, rows_of_logits, idx_mapping, self.use_fp64_gumbel
        )
        if drafts is None or not requests.are_random.any():
            sampled = draw(processed, requests, lambda: positions_of(input_batch))
        else:
            sampled = self._verified(processed, input_batch, requests, drafts)
        if self.trace_replay_state is not None:
            self.trace_replay_state.replace(sampled, input_batch)
        logprobs = None
        if dims is not None:
            wanted = processed if self.logprobs_mode.startswith("processed") else logits
            borders = None if num_drafts is None else input_batch.cu_num_logits_np.tolist()
            logprobs = self._logprobs(wanted, dims, sampled, idx_mapping, borders)
        return SamplerOutput(
            sampled_token_ids=sampled.view(-1, 1),
            logprobs_tensors=logprobs,
            num_nans=self._num_nans(logits, rows_of_logits, request_rows)
            if self.compute_nans
            else None,
            num_sampled=None,  # type: ignore[arg-type]
            num_rejected=None,  # type: ignore[arg-type]
            sampling_mask_tensors=self._kept(processed, request_rows)
            if self.return_sampling_mask
            else None,
        )

    def _kept(self, logits: torch.Tensor, request_rows: np.ndarray) -> SamplingMaskTensors:
        """Return the tokens that each row of logits was sampled from."""
        rows = torch.arange(len(logits) + 1, device=logits.device)
        most = int(self.sampling_states.top_k.np[request_rows].max())
        return SamplingMaskTensors.from_logits(logits, rows, torch.ones_like(rows[1:]), most)

    def _logprobs(
        self,
        logits: torch.Tensor,
        dims: tuple[int, int],
        sampled: torch.Tensor,
        idx_mapping: torch.Tensor,
        borders: list[int] | None,  # between the rows of requests with drafts
    ) -> Any:
        num_logprobs, num_token_ids = dims
        return compute_topk_scores(
            logits,
            num_logprobs,
            sampled,
            borders,
            logprob_token_ids_state=self.logprob_token_ids_state,
            expanded_idx_mapping=idx_mapping,
            max_per_req_token_ids=num_token_ids,
            logits_mode=self.logprobs_mode in ("raw_logits", "processed_logits"),
        )

    @staticmethod
    def _num_nans(
        logits: torch.Tensor, rows_of_logits: np.ndarray, request_rows: np.ndarray
    ) -> torch.Tensor:
        """Return the number of NaNs among the logits of each request, ``[num_reqs]``."""
        of_rows = logits.isnan().sum(-1)
        if len(rows_of_logits) == len(request_rows):
            return of_rows
        reqs = np.cumsum(np.diff(rows_of_logits, prepend=rows_of_logits[:1]) != 0)
        found = of_rows.new_zeros(len(request_rows))
        return found.index_add_(0, torch.from_numpy(reqs).to(logits.device), of_rows)

    @staticmethod
    def _verified(
        logits: torch.Tensor, input_batch: InputBatch, requests: RowsToDraw, drafts: SampledDrafts
    ) -> torch.Tensor:
        """Return the draft of each row if it is accepted, else the token in its place,
        ``[num_logits]``."""
        rows, num_steps = drafts.rows, drafts.logits.shape[1]
        num_drafts = input_batch.num_draft_tokens_per_req
        assert num_drafts is not None
        of_drafts = RowsToDraw(
            requests.states,
            input_batch.idx_mapping_np.repeat(num_drafts),
            requests.idx_mapping[rows],
        )
        at = of_drafts.idx_mapping * num_steps + input_batch.expanded_local_pos[rows]
        verified = verify_drawn_drafts(
            logits[rows].float(),
            drafts.logits.flatten(0, 1).index_select(0, at),
            of_drafts.temperature,
            drafts.token_ids,
            uniform(of_drafts, lambda: positions_of(input_batch)[rows]),
        )
        logits = logits.float().index_copy(0, rows, verified.logits)
        drawn = draw(logits, requests, lambda: positions_of(input_batch))
        tokens = torch.where(verified.are_accepted, drafts.token_ids, drawn[rows])
        return drawn.index_copy_(0, rows, tokens)


def positions_of(input_batch: InputBatch) -> torch.Tensor:
    """Return the position of each row of logits, int64 ``[num_logits]``."""
    return input_batch.positions[input_batch.logits_indices]
