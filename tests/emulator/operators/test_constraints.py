"""Each demand of a kernel is broken once and refused; each reading has a test that shows it."""

import pytest
import torch

from ascend_emulator.operators import (
    CONSTRAINTS,
    HOST_ARGUMENTS,
    KernelRefusalError,
    check_placement,
)
from ascend_emulator.operators.schemas import signature
from tests.emulator.operators import (
    test_atb_attention,
    test_cache_write,
    test_elementwise,
    test_experts,
    test_fused_attention,
    test_fused_layers,
    test_fused_route,
    test_fusion_attention,
    test_int8,
    test_latent,
)
from tests.emulator.operators.calls import Batch, cache_arguments, call, fused
from tests.emulator.operators.violations import VIOLATIONS

DEMANDS = [constraint for constraint in CONSTRAINTS if constraint.refused]
READINGS = [constraint for constraint in CONSTRAINTS if not constraint.refused]


def test_a_row_with_nothing_visible_is_nan_or_corrected_to_zero(seed):
    batch = Batch([(3, 1), (3, 1)], seed)
    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask[1] = True
    arguments = batch.padded("BSND", atten_mask=mask)
    output, _ = fused(arguments)
    assert output[0].isfinite().all() and output[1].isnan().all()
    output, lse = fused(arguments | {"inner_precise": 2, "softmax_lse_flag": True})
    assert (output[1] == 0).all() and lse[1].isposinf().all()


def test_requests_may_share_blocks(seed):
    batch = Batch([(256, 3), (256, 3)], seed)
    for rows in (batch.keys, batch.values):
        rows[1][:256] = rows[0][:256]
    arguments = batch.paged()
    arguments["block_table"][1, :2] = arguments["block_table"][0, :2]
    # Without the blocks that nobody needs any more, there are fewer than all requests have.
    used, compact = arguments["block_table"].unique(return_inverse=True)
    arguments["block_table"] = compact.int()
    for plane in ("key", "value"):
        arguments[plane] = arguments[plane][used.long()]
    assert len(used) < 6
    test_fused_attention.same(batch, arguments)


def test_factors_above_one_are_taken():
    test_elementwise.test_rotary_mul((1, 5, 1, 8), "half", torch.float32, 0)


SHOWN_BY = {
    ("fused attention", "window"): (
        test_fused_attention.test_a_window_of_w_is_pre_tokens_w_minus_one
    ),
    ("fused attention", "window of one token"): (
        test_fused_attention.test_a_window_of_w_is_pre_tokens_w_minus_one
    ),
    ("fused attention", "blocks outside of a band"): (
        test_fused_attention.test_blocks_outside_of_a_window_are_read_and_masked
    ),
    ("fused attention", "mask content"): (
        test_fused_attention.test_a_wrong_constant_gives_wrong_results
    ),
    ("fused attention", "band of a full mask"): (
        test_fused_attention.test_the_band_of_a_full_mask_starts_in_the_upper_left_corner
    ),
    ("fused attention", "TND with a block table"): (
        test_fused_attention.test_any_step_over_the_cache
    ),
    ("fused attention", "shared blocks"): test_requests_may_share_blocks,
    ("fused attention", "request without keys"): (
        test_fused_attention.test_padding_requests_get_zero_and_change_nothing
    ),
    ("fused attention", "softmax_lse not asked for"): (
        test_fused_attention.test_softmax_lse_is_empty_unless_asked_for
    ),
    ("fused attention", "softmax_lse of empty rows"): (
        test_fused_attention.test_padding_requests_get_zero_and_change_nothing
    ),
    ("fused attention", "fully masked rows"): (
        test_a_row_with_nothing_visible_is_nan_or_corrected_to_zero
    ),
    ("fused attention", "query rows past a length"): (
        test_fused_attention.test_layouts_with_a_batch_axis
    ),
    ("fused attention, FAI", "rows without keys in the decode kernel"): (
        test_fused_route.test_the_decode_kernel_leaves_rows_without_keys_undefined
    ),
    ("fused attention, rope", "latent rows twice"): test_latent.test_attention_over_latent_rows,
    ("npu_fusion_attention", "results for training"): (
        test_fusion_attention.test_results_that_only_training_reads_are_nan
    ),
    ("cache write", "padding slot"): (
        test_cache_write.test_each_token_lands_in_its_slot_and_padding_nowhere
    ),
    ("atb attention", "mask values of float16"): test_atb_attention.test_prompts,
    ("atb attention", "mask values of bfloat16"): (
        test_atb_attention.test_the_values_of_another_kernel_in_a_mask_give_wrong_results
    ),
    ("atb attention", "mask values of splitfuse"): test_atb_attention.test_mixed_steps,
    ("atb attention", "splitfuse has no mask of its own"): (
        test_atb_attention.test_splitfuse_sees_everything_that_the_mask_leaves
    ),
    ("atb attention", "request without context"): (
        test_atb_attention.test_a_decode_without_context_is_zero
    ),
    ("norms", "rounding of the sum"): test_elementwise.test_add_rms_norm,
    ("norms", "float32 of the result"): test_elementwise.test_add_rms_norm_cast,
    ("norms", "one is added to gamma"): test_fused_layers.test_gemma_rms_norm,
    ("gelu", "activated half"): test_fused_layers.test_geglu,
    ("npu_mrope", "rows with gaps"): test_fused_layers.test_rotary_of_slices_of_a_projection,
    ("npu_top_k_top_p", "order of sums"): test_fused_layers.test_top_p_keeps_the_smallest_set,
    ("npu_top_k_top_p", "ties at k"): test_fused_layers.test_ties_at_k_are_kept,
    ("npu_grouped_matmul, int8 rows", "rows of no group"): (
        test_int8.test_products_of_grouped_rows
    ),
    ("npu_dynamic_quant", "rows of zeros"): test_int8.test_a_row_of_zeros_stays_zero,
    ("npu_quant_matmul", "order of sums"): test_int8.test_products,
    ("norms to int8", "rounding before int8"): test_int8.test_norms,
    ("npu_dequant_swiglu_quant", "direction"): test_int8.test_activations,
    ("npu_dequant_swiglu_quant", "activated half"): test_int8.test_activations,
    **{
        ("npu_moe_init_routing_v2", name): (
            test_experts.test_rows_are_sorted_by_expert_and_inactive_ones_are_undefined
        )
        for name in ("inactive rows", "inactive pairs", "order")
    },
    **{
        ("npu_moe_token_unpermute", name): (
            test_experts.test_rows_of_a_token_are_weighted_and_summed
        )
        for name in ("index past the rows", "probability of 0")
    },
    ("npu_moe_finalize_routing", "pairs without a row"): (
        test_experts.test_rows_of_a_token_are_summed_though_it_lacks_some
    ),
    ("npu_moe_finalize_routing", "precision of sums"): (
        test_experts.test_rows_of_float16_are_summed_in_float16
    ),
    ("npu_grouped_matmul, rows", "rows of no group"): (
        test_experts.test_each_group_has_its_weight_and_rows_of_none_are_undefined
    ),
    **{
        ("npu_moe_gating_top_k", name): test_experts.test_experts_are_chosen_within_the_best_groups
        for name in ("division by the sum", "bias chooses")
    },
    ("npu_moe_gating_top_k_softmax_v2", "finished rows"): (
        test_experts.test_a_finished_row_gets_the_number_of_experts
    ),
    ("npu_moe_gating_top_k_softmax_v2", "order of softmax"): (
        test_experts.test_softmax_of_the_best_or_the_best_of_the_softmax
    ),
    ("npu_rotary_mul", "range of r1 and r2"): test_factors_above_one_are_taken,
}
"""The test that shows each reading."""


@pytest.mark.parametrize("constraint", DEMANDS, ids=lambda c: " / ".join(c.key))
def test_what_a_kernel_demands_is_demanded(constraint):
    violations = VIOLATIONS.get(constraint.key, [])
    assert violations, f"{constraint.key} has no violation: add one to violations.py"
    for violate in violations:
        with pytest.raises(RuntimeError) as refusal:
            violate()
        assert isinstance(refusal.value, KernelRefusalError), refusal.value
        assert refusal.value.constraint is constraint, refusal.value
        message = str(refusal.value)
        assert message.startswith(("npu::", "atb::")) and constraint.demand in message
        assert "argument " in message and "given " in message


@pytest.mark.parametrize("constraint", READINGS, ids=lambda c: " / ".join(c.key))
def test_each_reading_is_shown_by_a_test(constraint):
    assert callable(SHOWN_BY[constraint.key])


def test_no_violation_or_reading_is_left_over():
    assert set(VIOLATIONS) == {constraint.key for constraint in DEMANDS}
    assert set(SHOWN_BY) == {constraint.key for constraint in READINGS}


def test_messages_use_the_names_of_the_version_that_was_called():
    arguments = Batch([(5, 2)]).paged(actual_seq_lengths=[1])
    with pytest.raises(RuntimeError, match=r"score: argument actual_seq_lengths: given 1 for T 2"):
        fused(arguments)
    with pytest.raises(RuntimeError, match=r"score_v2: argument actual_seq_qlen: .*561002"):
        fused(arguments, version=2)


def test_a_refused_write_leaves_the_cache_alone():
    arguments = cache_arguments(slot_indices=torch.tensor([1, 2, 3, 4, 64], dtype=torch.int32))
    before = arguments["key_cache"].clone()
    with pytest.raises(KernelRefusalError):
        call("atb::_npu_reshape_and_cache", arguments)
    assert torch.equal(arguments["key_cache"], before)


def test_placement_of_what_the_plugin_passes_is_accepted():
    check_placement("atb::_npu_flash_attention", {"query": False, "mask": False, "seq_len": True})
    check_placement("npu::npu_rms_norm", {"input": False, "gamma": False})


@pytest.mark.parametrize("operator", HOST_ARGUMENTS)
def test_host_arguments_are_arguments(operator):
    assert set(HOST_ARGUMENTS[operator]) <= set(signature(operator).parameters)
