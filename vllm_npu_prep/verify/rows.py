"""Every row of ``verify-device``: the list of what the plugin asks of a device."""

from vllm_npu_prep.verify import (
    attention,
    collectives,
    copies,
    delta,
    engine,
    fused,
    graphs,
    int8,
    latent,
)
from vllm_npu_prep.verify.row import Record, Row

ROWS: tuple[Row, ...] = (
    *copies.ROWS,
    *attention.ROWS,
    *fused.ROWS,
    *latent.ROWS,
    *delta.ROWS,
    *int8.ROWS,
    *graphs.ROWS,
    *collectives.ROWS,
    *engine.ROWS,
)
"""All rows, in the order in which they run: what others build on comes first."""

NOT_CALLED = "the plugin does not call the operator; vllm-ascend does"
NO_ROW: dict[Record, str] = {
    ("fused attention", "unsupported argument"): "the plugin passes none of them",
    ("fused attention", "sparse modes of one token"): "the plugin uses no layout but TND",
    ("fused attention", "band of a full mask"): "the plugin gives mode 0 no mask",
    ("fused attention", "softmax_lse of empty rows"): "rows of nobody are left out",
    ("fused attention", "fully masked rows"): "every token sees itself",
    ("fused attention", "query rows past a length"): "the last length is always T",
    ("npu_fusion_attention", "unsupported argument"): "the plugin passes none of them",
    ("npu_fusion_attention", "results for training"): "the plugin reads the first result alone",
    ("npu_grouped_matmul", "inner limit"): "no model has rows of 65,536 elements",
    ("npu_transpose_batchmatmul", "unused arguments"): "the plugin passes none of them",
    ("npu_quant_matmul", "inner limit"): "no model has rows of 65,536 elements",
    ("npu_grouped_matmul, rows", "inner limit"): "no model has rows of 65,536 elements",
    ("npu_grouped_matmul, int8 rows", "inner limit"): "no model has rows of 65,536 elements",
    ("npu_mrope", "cache_mode of 8.5"): "the plugin passes 'default' before CANN 9.0",
    ("npu_mrope", "heads of 8.5"): "the plugin leaves more heads to torch before CANN 9.0",
    ("npu_moe_gating_top_k", "no table"): "the plugin passes no table",
    ("npu_moe_finalize_routing", "unsupported argument"): "the plugin passes none of them",
    ("npu_moe_token_unpermute", "probability of 0"): "the plugin gives no row a probability of 0",
    ("npu_kv_rmsnorm_rope_cache", "form"): NOT_CALLED,
    ("npu_kv_rmsnorm_rope_cache", "cache_mode"): NOT_CALLED,
    ("npu_kv_rmsnorm_rope_cache", "negative slots"): NOT_CALLED,
    ("npu_rotary_embedding", "shapes"): NOT_CALLED,
    ("npu_rotary_embedding", "first table"): NOT_CALLED,
    ("npu_clipped_swiglu", "rows past the groups"): NOT_CALLED,
    ("npu_moe_token_permute", "order of pairs"): NOT_CALLED,
    ("npu_scatter_nd_update", "repeated index"): NOT_CALLED,
    ("npu_weight_quant_batchmatmul", "form"): NOT_CALLED,
    ("cache write", "compression"): "the plugin passes no compression",
}
"""Records of what to try first on hardware (docs/changing/operators.md) that no row tries, and
why."""
