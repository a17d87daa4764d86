"""How V1's sampler is given its fused operator, and two repairs of vLLM's sampling in V1.

The repairs score chosen tokens (``logprob_token_ids``) beside other requests and drafts, and forget
budgets of thinking tokens.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors

from vllm_npu_prep.attention.fused_releases import version_of
from vllm_npu_prep.config import fused_operators, parse_config
from vllm_npu_prep.device import cann_version
from vllm_npu_prep.ops.npu.top_k_top_p import (
    FusedTopKTopPSampler,
    largest_k_of,
    limit_drafts_by,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import InputBatch

NOT_CHOSEN = -1
"""What stands in place of a token id where a request has chosen fewer tokens than others."""


def top_k_top_p_sampler(
    vllm_config: "VllmConfig",
    sampler: "TopKTopPSampler",
    # Returns the runner's batch, which a runner may replace
    input_batch: "Callable[[], InputBatch]",
) -> "TopKTopPSampler":
    """Return vLLM's sampler, or ours where its operator is used; drafts get the same limits."""
    if "top_k_top_p" not in fused_operators(vllm_config):
        limit_drafts_by(None)  # an earlier engine in this process may have set limits
        return sampler
    documented = parse_config(vllm_config.additional_config).kernel_rules == "documented"
    version = version_of(cann_version(vllm_config.device_config.device_type))

    def k_of_step() -> int | None:
        batch = input_batch()
        return int(batch.top_k_cpu[: batch.num_reqs].max()) if batch.num_reqs else None

    limited = FusedTopKTopPSampler(sampler, largest_k_of(version, documented), k_of_step)
    limit_drafts_by(limited)
    return limited


@contextlib.contextmanager
def score_chosen_tokens(
    sampler: "Sampler",  # vLLM's sampler, which its rejection sampler also asks
    batch: "InputBatch",  # vLLM's batch, with at least one request that has logprob_token_ids
) -> Iterator[None]:
    """Let a step's samples be scored for requests with ``logprob_token_ids`` as V2 does it.

    vLLM's V1 gives each row of such a step the chosen tokens alone: the other requests lose their
    likeliest tokens. Its rejection sampler knows no chosen tokens at all (vLLM issue 44727). Here
    the sampler is asked for the likeliest tokens of all rows, and those of rows that chose others
    are replaced.
    """
    metadata, gather = batch.sampling_metadata, sampler.gather_logprobs
    of_requests = metadata.logprob_token_ids or {}
    most, num_reqs = max(map(len, of_requests.values()), default=0), batch.num_reqs
    chosen = np.full((num_reqs, most), NOT_CHOSEN, np.int32)
    for index, ids in of_requests.items():
        chosen[index, : len(ids)] = ids

    def gather_logprobs(
        logprobs: torch.Tensor,  # [rows, vocab_size]; a request has as many rows as any other
        num_logprobs: int,
        token_ids: torch.Tensor,  # [rows]
    ) -> LogprobsTensors:
        found = gather(logprobs, num_logprobs, token_ids)
        missing = (0, max(most - num_logprobs, 0))  # before and after the columns that there are
        ids = torch.nn.functional.pad(found.logprob_token_ids, missing)
        scores = torch.nn.functional.pad(found.logprobs, missing, value=float("-inf"))
        wanted = async_tensor_h2d(chosen, logprobs.device)
        wanted = wanted.repeat_interleave(len(logprobs) // num_reqs, dim=0)
        is_chosen, columns = wanted != NOT_CHOSEN, slice(1, 1 + most)
        wanted_scores = logprobs.gather(-1, wanted.clamp(min=0).long())
        ids[:, columns] = torch.where(is_chosen, wanted, ids[:, columns])
        scores[:, columns] = torch.where(is_chosen, wanted_scores, scores[:, columns])
        return LogprobsTensors(ids, scores, found.selected_token_ranks)

    asked: Any = sampler
    asked.gather_logprobs = gather_logprobs
    batch.sampling_metadata = replace(
        metadata, max_num_logprobs=metadata.max_num_logprobs or 0, logprob_token_ids=None
    )
    try:
        yield
    finally:
        del asked.gather_logprobs
        batch.sampling_metadata = metadata


def drop_thinking_budgets(batch: "InputBatch") -> None:
    """Forget budgets of thinking tokens in rows that other requests have moved to.

    vLLM's V1 keeps the budget of a request that has left if the request that moves to its row has
    none: that request would be made to end a thought for which nobody gave it a budget.

    Parameters
    ----------
    batch
        vLLM's batch, condensed and not reordered yet: all moves are to rows of requests that have
        left.
    """
    holder = batch.thinking_budget_state_holder
    if holder is not None:
        for _, row, _ in batch.batch_update_builder.moved:
            holder._state.pop(row, None)
