"""Replacements for vLLM's Triton kernels, experts and routing, registered through its own hooks."""

from typing import Literal

from vllm_npu_prep.compat import kernels


def register_overrides(triton_kernels: Literal["replace", "keep"]) -> None:
    """Replace the kernels that a worker can reach, before it can launch one.

    Parameters
    ----------
    triton_kernels
        Whether to replace Triton kernels or to keep vLLM's own. Experts and routing are always
        replaced: vLLM's are compiled kernels, which don't exist here.
    """
    from vllm_npu_prep.ops import experts, routing

    if triton_kernels == "replace":
        replace_triton_kernels()
    routing.register_operators()
    experts.register_method()


def replace_triton_kernels() -> None:
    """Replace the kernels of vLLM's block tables, of drafters and of the rejection sampler."""
    from vllm_npu_prep.ops import drafting, rejection, slot_mapping

    drafter = "vllm.v1.spec_decode.utils"
    sampler = "vllm.v1.sample.rejection_sampler"
    kernels.override_triton_kernels(
        {
            "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": (
                slot_mapping.compute_slot_mapping
            ),
            f"{drafter}.eagle_step_slot_mapping_metadata_kernel": (
                drafting.eagle_step_slot_mapping_metadata
            ),
            f"{drafter}.eagle_prepare_inputs_padded_kernel": drafting.eagle_prepare_inputs_padded,
            f"{drafter}.eagle_prepare_next_token_padded_kernel": (
                drafting.eagle_prepare_next_token_padded
            ),
            f"{drafter}.copy_and_expand_eagle_inputs_kernel": drafting.copy_and_expand_eagle_inputs,
            f"{sampler}.rejection_greedy_sample_kernel": rejection.rejection_greedy_sample,
            f"{sampler}.rejection_random_sample_kernel": rejection.rejection_random_sample,
            f"{sampler}.expand_kernel": rejection.expand,
            f"{sampler}.sample_recovered_tokens_kernel": rejection.sample_recovered_tokens,
        }
    )
