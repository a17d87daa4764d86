"""The sampler of vLLM's V2 runner, without Triton: a step launches what it needs."""

from typing import Any

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_npu_prep.compat import v2
from vllm_npu_prep.ops.gumbel import gumbel_noise


class SlotSampler(Sampler):
    """Upstream's sampler, by its own states of sampling parameters.

    A greedy step is one launch, an argmax. Steps whose requests have no seed of their own draw
    from torch's generator; rows with a seed get the noise of upstream's kernel, so that a request
    with a seed gets the same tokens whatever it is batched with.
    """

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        """Sample a token for each row of logits.

        Parameters
        ----------
        logits
            ``[num_logits, vocab_size]``: a row for each draft of a request, and one after them.
        input_batch
            The step.

        Returns
        -------
        SamplerOutput
            int64 ``[num_logits, 1]``; numbers of samples are left to the host, which knows them.
        """
        slots, idx_mapping = input_batch.idx_mapping_np, input_batch.expanded_idx_mapping
        num_drafts = input_batch.num_draft_tokens_per_req
        row_slots = slots if num_drafts is None else slots.repeat(num_drafts + 1)
        dims = self.get_logprobs_dims(slots)
        processed, pos = logits, None
        if self.needs_logits_processing[slots].any():
            pos = input_batch.positions[input_batch.logits_indices]
            processed = self.apply_sampling_params(
                logits,
                idx_mapping,
                input_batch.idx_mapping,
                slots,
                pos,
                input_batch.input_ids[input_batch.logits_indices],
                input_batch.expanded_local_pos,
                input_batch.seq_lens_cpu_upper_bound.numpy(),
                skip_top_k_top_p=True,
            )
        top_k, top_p = v2.top_k_and_top_p(
            self.sampling_states, idx_mapping, slots, logits.shape[-1]
        )
        if top_k is not None or top_p is not None:
            processed = apply_top_k_top_p(processed, top_k, top_p)
        sampled = self._draw(processed, input_batch, row_slots, pos)
        logprobs = None
        if dims is not None:
            wanted = processed if self.logprobs_mode.startswith("processed") else logits
            borders = None if num_drafts is None else input_batch.cu_num_logits_np.tolist()
            logprobs = self._logprobs(wanted, dims, sampled, idx_mapping, borders)
        return SamplerOutput(
            sampled_token_ids=sampled.view(-1, 1),
            logprobs_tensors=logprobs,
            num_nans=self._num_nans(logits, row_slots, slots) if self.compute_nans else None,
            num_sampled=None,  # type: ignore[arg-type]
            num_rejected=None,  # type: ignore[arg-type]
        )

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
    def _num_nans(logits: torch.Tensor, row_slots: np.ndarray, slots: np.ndarray) -> torch.Tensor:
        """NaNs among the logits of each request, ``[num_reqs]``."""
        of_rows = logits.isnan().sum(-1)
        if len(row_slots) == len(slots):
            return of_rows
        reqs = np.cumsum(np.diff(row_slots, prepend=row_slots[:1]) != 0)
        found = of_rows.new_zeros(len(slots))
        return found.index_add_(0, torch.from_numpy(reqs).to(logits.device), of_rows)

    def _draw(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        slots: np.ndarray,  # [num_logits] int, of each row
        pos: torch.Tensor | None,
    ) -> torch.Tensor:
        """The largest logit of each row, with Gumbel noise where the temperature is not 0."""
        states = self.sampling_states
        is_random = states.temperature.np[slots] != 0
        if not is_random.any():
            return logits.argmax(-1)
        logits = logits.float()
        has_seed = states.seeds_set[slots] & is_random
        if has_seed.all():
            noise = self._seeded_noise(logits, input_batch, pos, None)
        else:
            noise = torch.empty_like(logits).exponential_().log_().neg_()
            if has_seed.any():
                rows = torch.from_numpy(np.flatnonzero(has_seed)).to(logits.device)
                seeded = self._seeded_noise(logits, input_batch, pos, rows)
                noise.index_copy_(0, rows, seeded)
        if not is_random.all():
            greedy = states.temperature.gpu[input_batch.expanded_idx_mapping] == 0
            noise.masked_fill_(greedy[:, None], 0)
        return noise.add_(logits).argmax(-1)

    def _seeded_noise(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        pos: torch.Tensor | None,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Noise ``[rows, vocab_size]`` by the requests' seeds and positions."""
        if pos is None:
            pos = input_batch.positions[input_batch.logits_indices]
        idx_mapping = input_batch.expanded_idx_mapping
        if rows is not None:
            pos, idx_mapping = pos[rows], idx_mapping[rows]
        seeds = self.sampling_states.seeds.gpu[idx_mapping]
        return gumbel_noise(seeds, pos, logits.shape[1])
