"""What a step costs around its preparation: requests brought up to date, sampled tokens booked.

Upstream does both one request at a time, with several numpy scalars each. Here the requests that do
nothing unusual are done together; whatever is unusual goes to upstream's own methods.
"""

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm import envs
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import SamplerOutput

from vllm_npu_prep.attention.block_tables import DeviceBlockTables
from vllm_npu_prep.attention.local_attention import find_local_groups
from vllm_npu_prep.model_inputs import ModelInputRunner
from vllm_npu_prep.prep.bookkeeping import append_sampled_tokens
from vllm_npu_prep.prompt_embeds import without_unknown_ids

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

PLACEHOLDER = -1
"""Token id of a sample that is not on the host yet."""


class BookkeepingRunner(ModelInputRunner):
    """Upstream's runner with short ways for plain requests."""

    block_tables: DeviceBlockTables

    def may_reinitialize_input_batch(self, kv_cache_config: KVCacheConfig) -> None:
        """Put block tables in upstream's batch that know what the device has of them."""
        super().may_reinitialize_input_batch(kv_cache_config)
        self.local_groups = find_local_groups(self.attn_groups)
        self.block_tables = DeviceBlockTables(
            self.input_batch.block_table,
            self.max_num_reqs,
            self.device,
            self.local_groups.blocks_per_chunk if self.local_groups else 1,
        )
        self.input_batch.block_table = self.block_tables
        self._rows = np.arange(self.max_num_reqs)
        self._placeholders = np.full(self.max_num_reqs, PLACEHOLDER, np.int64)

    def _update_states(self, scheduler_output: "SchedulerOutput") -> Any:
        """Requests that go on where they were are brought up to date together; upstream sees the
        others."""
        if self._rows_tell_all():
            scheduler_output = copy.copy(scheduler_output)
            scheduler_output.scheduled_cached_reqs = self._advance_requests(
                scheduler_output.scheduled_cached_reqs
            )
        new_reqs = scheduler_output.scheduled_new_reqs
        if all(new.prompt_embeds is None for new in new_reqs):
            return super()._update_states(scheduler_output)
        no_token = self.input_batch.vocab_size
        scheduler_output = copy.copy(scheduler_output)
        scheduler_output.scheduled_new_reqs = [without_unknown_ids(r, no_token) for r in new_reqs]
        deferred = super()._update_states(scheduler_output)
        for new in new_reqs:
            if new.prompt_embeds is not None:  # no ids to give log-probabilities of
                self.num_prompt_logprobs.pop(new.req_id, None)
        return deferred

    def _rows_tell_all(self) -> bool:
        """Whether nobody reads ``num_computed_tokens`` of a request beside the batch's tables.

        Drafters, state-space models and prompt log-probabilities do. Stages of a pipeline
        get their tokens from the scheduler, which upstream enters.
        """
        return not (
            self.speculative_config is not None
            or self.parallel_config.pipeline_parallel_size > 1
            or self.model_config.is_hybrid
            or self.num_prompt_logprobs
        )

    def _advance_requests(self, cached: CachedRequestData) -> CachedRequestData:
        """Bring requests up to date that are in the batch and lost nothing.

        All of it concerns their own rows only, so it may come before upstream adds and removes.

        Returns
        -------
        CachedRequestData
            The other requests.
        """
        batch, req_ids = self.input_batch, cached.req_ids
        rows_by_id = batch.req_id_to_index
        if req_ids == batch.req_ids and not cached.resumed_req_ids:
            rows = self._rows[: len(req_ids)]
        else:
            rows = np.array(
                [-1 if r in cached.resumed_req_ids else rows_by_id.get(r, -1) for r in req_ids],
                np.int64,
            )
        has_outputs = batch.num_tokens_no_spec[rows] - batch.num_prompt_tokens[rows]
        stays = (rows >= 0) & (has_outputs <= np.array(cached.num_output_tokens, np.int32))
        others: list[int] = np.flatnonzero(~stays).tolist()
        computed = np.array(cached.num_computed_tokens, np.int32)
        batch.num_computed_tokens_cpu[rows[stays]] = computed[stays]
        for index, new_block_ids in enumerate(cached.new_block_ids):
            if new_block_ids is not None and stays[index]:
                for block_ids, new_ids in zip(
                    self.requests[req_ids[index]].block_ids, new_block_ids
                ):
                    block_ids.extend(new_ids)
                batch.block_table.append_row(new_block_ids, rows[index])

        def of_others(values: list[Any]) -> list[Any]:
            return [values[index] for index in others]

        return CachedRequestData(
            req_ids=of_others(req_ids),
            resumed_req_ids=cached.resumed_req_ids,
            new_token_ids=[],
            all_token_ids=cached.all_token_ids,
            new_block_ids=of_others(cached.new_block_ids),
            num_computed_tokens=of_others(cached.num_computed_tokens),
            num_output_tokens=of_others(cached.num_output_tokens),
        )

    def _bookkeeping_sync(
        self,
        scheduler_output: "SchedulerOutput",
        sampler_output: SamplerOutput,
        logits: torch.Tensor | None,
        hidden_states: torch.Tensor,
        num_scheduled_tokens: int,
    ) -> tuple[Any, ...]:
        """One token for each request, and nobody wants more: book them together."""
        batch = self.input_batch
        plain = (
            sampler_output.sampled_token_ids.shape == (batch.num_reqs, 1)
            and not batch.generators
            and not self.num_prompt_logprobs
            and not envs.VLLM_COMPUTE_NANS_IN_LOGITS
        )
        if plain:
            booked = self._book_plain(sampler_output)
        else:
            booked = super()._bookkeeping_sync(
                scheduler_output, sampler_output, logits, hidden_states, num_scheduled_tokens
            )
        if self.use_async_scheduling:
            self.block_tables.mark_rows(self.discard_request_mask.np[: batch.num_reqs])
        return booked

    def _book_plain(self, sampler_output: SamplerOutput) -> tuple[Any, ...]:
        """Enter sampled tokens, or placeholders for those that are still on the device.

        Returns
        -------
        tuple
            As upstream's ``_bookkeeping_sync``.

        Raises
        ------
        AssertionError
            If a request has no room for its token, as upstream does.
        """
        batch = self.input_batch
        num_reqs, sampled = batch.num_reqs, sampler_output.sampled_token_ids
        outputs: list[Any] = batch.req_output_token_ids  # the lists that `CachedRequestState` holds
        req_ids, req_id_to_index = batch.req_ids.copy(), batch.req_id_to_index.copy()
        discard = self.discard_request_mask.np[:num_reqs]
        discarded: list[int] = np.flatnonzero(discard).tolist()
        tokens: list[list[int]] = []
        logprobs = None
        if self.use_async_scheduling:
            tokens_np = self._placeholders[:num_reqs]
            kept = req_id_to_index.copy()
            for row in discarded:
                del kept[req_ids[row]]
            if batch.prev_sampled_token_ids is None:
                batch.prev_sampled_token_ids = sampled
            batch.prev_req_id_to_index = kept
            for row in kept.values():
                outputs[row].append(PLACEHOLDER)
        else:
            tokens = self._to_list(sampled)
            tokens_np = self.sampled_token_ids_pinned_cpu[:num_reqs, 0].numpy()
            for row in discarded:
                tokens[row].clear()
            for output_token_ids, new_token_ids in zip(outputs, tokens):
                output_token_ids.extend(new_token_ids)
            if sampler_output.logprobs_tensors is not None:
                logprobs = sampler_output.logprobs_tensors.tolists()
        full = append_sampled_tokens(
            tokens_np, discard, batch.num_tokens_no_spec, batch.token_ids_cpu, batch.is_token_ids
        )
        assert full < 0, (
            f"request {req_ids[full]} holds max_model_len={self.max_model_len} tokens already and "
            "was sampled for"
        )
        invalid = discarded if self.use_async_scheduling else []
        return {}, None, logprobs, tokens, {}, req_ids, req_id_to_index, invalid
