"""Replacements for vLLM's kernels, registered through its own hooks: Triton's, experts, routing."""

from collections.abc import Callable
from typing import Any

from vllm_npu_prep import compat


def register_overrides() -> None:
    """Replace what a runner reaches with ngram drafts, vLLM's own block tables, and experts."""
    from vllm_npu_prep.ops import experts, rejection, routing, slot_mapping

    sampler = "vllm.v1.sample.rejection_sampler"
    overrides: dict[str, Callable[..., Any]] = {
        "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": (
            slot_mapping.compute_slot_mapping
        ),
        f"{sampler}.rejection_greedy_sample_kernel": rejection.rejection_greedy_sample,
        f"{sampler}.rejection_random_sample_kernel": rejection.rejection_random_sample,
        f"{sampler}.expand_kernel": rejection.expand,
        f"{sampler}.sample_recovered_tokens_kernel": rejection.sample_recovered_tokens,
    }
    compat.override_triton_kernels(overrides)
    routing.register_operators()
    experts.register_method()
