"""Updates requests before a step and appends sampled tokens after it, for many requests at once.

Upstream does both one request at a time, with several numpy scalars each. Here ordinary requests
are handled together; all others go to upstream's own methods.
"""

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_npu_prep.prep.batch import BatchTables
from vllm_npu_prep.prep.bookkeeping import append_sampled_tokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_npu_prep.attention.block_tables import DeviceBlockTables
    from vllm_npu_prep.prep.local_attention import LocalGroups
    from vllm_npu_prep.prep.mrope import MropeTables

PLACEHOLDER = -1
"""Token id of a sample that is not on the host yet."""


class Bookkeeping:
    """Fast paths for plain requests of upstream's input batch.

    Parameters
    ----------
    max_num_reqs, max_model_len
        Of the engine.
    asynchronous
        True if samples are still on the device when they are appended (asynchronous scheduling).
    requests_are_read
        True if something reads ``num_computed_tokens`` or the tokens of a `CachedRequestState`, so
        that updating the batch's tables is not enough (`requests_are_read`).
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
        requests_are_read: bool,
        read_back: Callable[[torch.Tensor], list[list[int]]],
        samples_np: np.ndarray,
    ) -> None:
        self.max_model_len, self.asynchronous = max_model_len, asynchronous
        self.requests_are_read = requests_are_read
        self._read_back, self._samples_np = read_back, samples_np
        self._rows = np.arange(max_num_reqs)
        self._placeholders = np.full(max_num_reqs, PLACEHOLDER, np.int64)

    # ----------------------------------------------------------------- before a step

    def can_batch_update(self, num_prompt_logprobs: Mapping[str, int]) -> bool:
        """True if nothing reads `CachedRequestState`, so updating the batch's tables is enough.

        Parameters
        ----------
        num_prompt_logprobs
            Requests that want log-probabilities of their prompt, which read `CachedRequestState`.
        """
        return not (self.requests_are_read or num_prompt_logprobs)

    def update_plain_requests(
        self,
        scheduler_output: "SchedulerOutput",
        batch: InputBatch,
        requests: Mapping[str, CachedRequestState],
    ) -> "SchedulerOutput":
        """Update the requests that stay in the batch and lost no tokens or blocks.

        This changes their own rows only, so upstream may add and remove requests afterwards.

        Returns
        -------
        SchedulerOutput
            For upstream: the output without the requests that are done.
        """
        cached = scheduler_output.scheduled_cached_reqs
        req_ids, rows_by_id = cached.req_ids, batch.req_id_to_index
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
                for block_ids, new_ids in zip(requests[req_ids[index]].block_ids, new_block_ids):
                    block_ids.extend(new_ids)
                batch.block_table.append_row(new_block_ids, rows[index])

        def of_others(values: list[Any]) -> list[Any]:
            return [values[index] for index in others]

        scheduler_output = copy.copy(scheduler_output)
        scheduler_output.scheduled_cached_reqs = CachedRequestData(
            req_ids=of_others(req_ids),
            resumed_req_ids=cached.resumed_req_ids,
            new_token_ids=[],
            all_token_ids=cached.all_token_ids,
            new_block_ids=of_others(cached.new_block_ids),
            num_computed_tokens=of_others(cached.num_computed_tokens),
            num_output_tokens=of_others(cached.num_output_tokens),
        )
        return scheduler_output

    # ----------------------------------------------------------------- after its samples

    def can_append_together(
        self,
        batch: InputBatch,
        sampler_output: SamplerOutput,
        num_prompt_logprobs: Mapping[str, int],
    ) -> bool:
        """Whether each request got one token and needs nothing else."""
        return (
            sampler_output.sampled_token_ids.shape == (batch.num_reqs, 1)
            and not batch.generators
            and not num_prompt_logprobs
            and not envs.VLLM_COMPUTE_NANS_IN_LOGITS
        )

    def append_sampled_tokens(
        self,
        batch: InputBatch,
        sampler_output: SamplerOutput,
        discard: np.ndarray,  # [num_reqs] bool
    ) -> tuple[Any, ...]:
        """Append sampled tokens, or placeholders for tokens that are still on the device.

        Returns
        -------
        tuple
            As upstream's ``_bookkeeping_sync``.

        Raises
        ------
        AssertionError
            If a request has no room for its token, as upstream does.
        """
        num_reqs, sampled = batch.num_reqs, sampler_output.sampled_token_ids
        outputs: list[Any] = batch.req_output_token_ids  # the lists that `CachedRequestState` holds
        req_ids, req_id_to_index = batch.req_ids.copy(), batch.req_id_to_index.copy()
        discarded: list[int] = np.flatnonzero(discard).tolist()
        tokens: list[list[int]] = []
        logprobs = None
        if self.asynchronous:
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
            tokens = self._read_back(sampled)
            tokens_np = self._samples_np[:num_reqs, 0]
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
        invalid = discarded if self.asynchronous else []
        return {}, None, logprobs, tokens, {}, req_ids, req_id_to_index, invalid


def requests_are_read(vllm_config: VllmConfig) -> bool:
    """Whether `CachedRequestState` is read, so that updating the batch's tables is not enough.

    Drafters and state-space models read ``num_computed_tokens``. Stages of a pipeline get their
    tokens from the scheduler, and upstream appends them.
    """
    return (
        vllm_config.speculative_config is not None
        or vllm_config.parallel_config.pipeline_parallel_size > 1
        or vllm_config.model_config.is_hybrid
    )


def tables_of(
    batch: InputBatch,
    blocks: "DeviceBlockTables",
    *,
    chunked_prefill: bool,
    mrope: "MropeTables | None" = None,
    local: "LocalGroups | None" = None,
) -> BatchTables:
    """Upstream's input batch by the names of the pure core: views, nothing is copied.

    Parameters
    ----------
    batch, blocks
        The batch and its block tables.
    chunked_prefill, mrope, local
        See `BatchTables`.
    """
    return BatchTables(
        num_computed_tokens=batch.num_computed_tokens_cpu,
        num_prompt_tokens=batch.num_prompt_tokens,
        num_tokens=batch.num_tokens_no_spec,
        token_ids=batch.token_ids_cpu,
        block_table_flat=blocks.block_table_flat_np,
        max_num_blocks=blocks.max_num_blocks,
        block_sizes=np.array([table.block_size for table in blocks.block_tables], np.int32),
        num_blocks=blocks.num_blocks,
        num_synced_blocks=blocks.num_synced_blocks,
        num_device_blocks=blocks.num_device_blocks,
        chunked_prefill=chunked_prefill,
        mrope=mrope,
        local=local,
    )
