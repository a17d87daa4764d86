"""Functions of CANN's libopapi by release: what the emulated library exports.

Read from CANN's ops-transformer, ops-nn and ops-math (tags v8.5.0 and v9.0.0, branch 9.1.0), for
the functions that op-plugin calls behind operators that have a reference.
"""

BY_OPERATOR = {
    "npu::npu_add_rms_norm": ("aclnnAddRmsNorm",),
    "npu::npu_add_rms_norm_cast": ("aclnnAddRmsNormCast",),
    "npu::npu_add_rms_norm_dynamic_quant": ("aclnnAddRmsNormDynamicQuantV2",),
    "npu::npu_add_rms_norm_quant": ("aclnnAddRmsNormQuant", "aclnnAddRmsNormQuantV2"),
    "npu::npu_attention_update": ("aclnnAttentionUpdate",),
    "npu::npu_chunk_gated_delta_rule": ("aclnnChunkGatedDeltaRule",),
    "npu::npu_clipped_swiglu": ("aclnnClippedSwiglu",),
    "npu::npu_dequant_swiglu_quant": ("aclnnDequantSwigluQuant", "aclnnDequantSwigluQuantV2"),
    "npu::npu_dynamic_quant": (
        "aclnnDynamicQuant",
        "aclnnDynamicQuantV2",
        "aclnnDynamicQuantV3",
        "aclnnDynamicQuantV4",
    ),
    "npu::npu_fast_gelu": ("aclnnFastGelu",),
    "npu::npu_fused_infer_attention_score": (
        "aclnnFusedInferAttentionScoreV3",
        "aclnnFusedInferAttentionScoreV5",
    ),
    "npu::npu_fused_infer_attention_score_v2": ("aclnnFusedInferAttentionScoreV4",),
    "npu::npu_fusion_attention": (
        "aclnnFlashAttentionScore",
        "aclnnFlashAttentionVarLenScore",
        "aclnnFlashAttentionVarLenScoreV4",
        "aclnnFlashAttentionVarLenScoreV5",
    ),
    "npu::npu_gather_pa_kv_cache": ("aclnnGatherPaKvCache",),
    "npu::npu_geglu": ("aclnnGeGluV3",),
    "npu::npu_gelu": ("aclnnGeluV2",),
    "npu::npu_gemma_rms_norm": ("aclnnGemmaRmsNorm",),
    "npu::npu_grouped_matmul": ("aclnnGroupedMatmulV4", "aclnnGroupedMatmulV5"),
    "npu::npu_interleave_rope": ("aclnnInterleaveRope",),
    "npu::npu_kv_rmsnorm_rope_cache": ("aclnnKvRmsNormRopeCache", "aclnnKvRmsNormRopeCacheV2"),
    "npu::npu_lightning_indexer": ("aclnnLightningIndexer",),
    "npu::npu_moe_distribute_combine_v2": (
        "aclnnMoeDistributeCombineV2",
        "aclnnMoeDistributeCombineV3",
    ),
    "npu::npu_moe_distribute_dispatch_v2": (
        "aclnnMoeDistributeDispatchV2",
        "aclnnMoeDistributeDispatchV3",
    ),
    "npu::npu_moe_finalize_routing": ("aclnnMoeFinalizeRouting", "aclnnMoeFinalizeRoutingV2"),
    "npu::npu_moe_gating_top_k": ("aclnnMoeGatingTopK",),
    "npu::npu_moe_gating_top_k_softmax_v2": ("aclnnMoeGatingTopKSoftmaxV2",),
    "npu::npu_moe_init_routing_v2": ("aclnnMoeInitRoutingV2", "aclnnMoeInitRoutingV3"),
    "npu::npu_moe_token_permute": ("aclnnMoeTokenPermute",),
    "npu::npu_moe_token_unpermute": ("aclnnMoeTokenUnpermute",),
    "npu::npu_mrope": ("aclnnRopeWithSinCosCache", "aclnnRopeWithSinCosCacheV2"),
    "npu::npu_quant_matmul": ("aclnnQuantMatmulV4", "aclnnQuantMatmulV5"),
    "npu::npu_quantize": ("aclnnAscendQuant", "aclnnAscendQuantV3", "aclnnQuantize"),
    "npu::npu_recurrent_gated_delta_rule": ("aclnnRecurrentGatedDeltaRule",),
    "npu::npu_rms_norm": ("aclnnRmsNorm",),
    "npu::npu_rotary_mul": ("aclnnRotaryPositionEmbedding", "aclnnRotaryPositionEmbeddingV2"),
    "npu::npu_scatter_pa_kv_cache": ("aclnnScatterPaKvCache",),
    "npu::npu_scatter_nd_update_": ("aclnnScatterNdUpdate",),
    "npu::npu_sparse_flash_attention": ("aclnnSparseFlashAttention",),
    "npu::npu_swiglu": ("aclnnSwiGlu",),
    "npu::npu_top_k_top_p": ("aclnnApplyTopKTopP",),
    "npu::npu_transpose_batchmatmul": ("aclnnTransposeBatchMatMul",),
    "npu::npu_weight_quant_batchmatmul": (
        "aclnnWeightQuantBatchMatmulV2",
        "aclnnWeightQuantBatchMatmulV3",
    ),
}
"""Functions behind each operator, by any of which it can be called."""

SINCE = {
    "aclnnChunkGatedDeltaRule": "9.1",
    "aclnnDynamicQuantV4": "9.1",
    "aclnnFusedInferAttentionScoreV5": "9.0",
    "aclnnKvRmsNormRopeCacheV2": "9.1",
    "aclnnRopeWithSinCosCacheV2": "9.0",
}
"""First release of a function; all others are in 8.5."""


def has(release: str, function: str) -> bool:
    """Whether a release has a function."""
    first = SINCE.get(function, release)
    return [int(part) for part in release.split(".")] >= [int(part) for part in first.split(".")]


def exported(release: str) -> list[str]:
    """All functions of a release, without those that size their workspaces."""
    return [name for names in BY_OPERATOR.values() for name in names if has(release, name)]


def missing(release: str, operator: str) -> str | None:
    """The function that an operator lacks in a release; None if it can be called."""
    names = BY_OPERATOR.get(operator, ())
    lacks = bool(names) and not any(has(release, name) for name in names)
    return names[0] if lacks else None
