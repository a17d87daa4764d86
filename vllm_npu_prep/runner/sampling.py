"""The sampler's fused operator, and what of a step it has to know from the host."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_npu_prep.attention.fused_releases import version_of
from vllm_npu_prep.config import fused_operators, parse_config
from vllm_npu_prep.device import cann_version
from vllm_npu_prep.ops.fused_sampling import (
    FusedTopKTopPSampler,
    largest_k_of,
    limit_drafts_by,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.worker.gpu_input_batch import InputBatch


def top_k_top_p_sampler(
    vllm_config: "VllmConfig",
    sampler: "TopKTopPSampler",
    input_batch: "Callable[[], InputBatch]",
) -> "TopKTopPSampler":
    """vLLM's sampler, or ours where the operator is used; drafts get the same limits by it.

    Parameters
    ----------
    vllm_config
        The engine's config.
    sampler
        vLLM's.
    input_batch
        Gives the runner's batch, which a runner may replace.
    """
    if "top_k_top_p" not in fused_operators(vllm_config):
        limit_drafts_by(None)  # an engine before this one may have had it
        return sampler
    documented = parse_config(vllm_config.additional_config).kernel_rules == "documented"
    version = version_of(cann_version(vllm_config.device_config.device_type))

    def k_of_step() -> int | None:
        batch = input_batch()
        return int(batch.top_k_cpu[: batch.num_reqs].max()) if batch.num_reqs else None

    limited = FusedTopKTopPSampler(sampler, largest_k_of(version, documented), k_of_step)
    limit_drafts_by(limited)
    return limited
