"""The functions of CANN behind torch_npu's operators, and which of them the installed CANN has.

torch_npu looks a function up when its operator is first called, so an operator of the wheel may
lack the function that it calls. Sources: Ascend/op-plugin, ``GetOpApiFuncAddr`` in
``utils/op_api_common.cpp`` for where it looks, and each operator's file for what it calls; CANN's
ops-transformer, ops-nn and ops-math, tags v8.5.0 and v9.0.0 and branch 9.1.0, for what each release
has. Where op-plugin falls back to an older function, that one stands here.
"""

import ctypes
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

LIBRARY = "libopapi.so"
CUSTOM_LIBRARY = "op_api/lib/libcust_opapi.so"
PARTS = ("ops_infer", "ops_train", "math", "sparse", "fft", "rand")
"""The names of the libraries ``libaclnn_*.so``, which some releases have beside `LIBRARY`."""

FUNCTIONS = {
    "npu_add_rms_norm": "aclnnAddRmsNorm",
    "npu_add_rms_norm_cast": "aclnnAddRmsNormCast",
    "npu_add_rms_norm_dynamic_quant": "aclnnAddRmsNormDynamicQuantV2",
    "npu_add_rms_norm_quant": "aclnnAddRmsNormQuant",
    "npu_attention_update": "aclnnAttentionUpdate",
    "npu_chunk_gated_delta_rule": "aclnnChunkGatedDeltaRule",
    "npu_dequant_swiglu_quant": "aclnnDequantSwigluQuant",
    "npu_dynamic_quant": "aclnnDynamicQuant",
    "npu_fused_infer_attention_score": "aclnnFusedInferAttentionScoreV3",
    "npu_fused_infer_attention_score_v2": "aclnnFusedInferAttentionScoreV4",
    "npu_fusion_attention": "aclnnFlashAttentionVarLenScore",
    "npu_gather_pa_kv_cache": "aclnnGatherPaKvCache",
    "npu_geglu": "aclnnGeGluV3",
    "npu_gelu": "aclnnGeluV2",
    "npu_gemma_rms_norm": "aclnnGemmaRmsNorm",
    "npu_grouped_matmul": "aclnnGroupedMatmulV4",
    "npu_lightning_indexer": "aclnnLightningIndexer",
    "npu_moe_distribute_combine_v2": "aclnnMoeDistributeCombineV2",
    "npu_moe_distribute_dispatch_v2": "aclnnMoeDistributeDispatchV2",
    "npu_moe_finalize_routing": "aclnnMoeFinalizeRoutingV2",
    "npu_moe_gating_top_k": "aclnnMoeGatingTopK",
    "npu_moe_gating_top_k_softmax_v2": "aclnnMoeGatingTopKSoftmaxV2",
    "npu_moe_init_routing_v2": "aclnnMoeInitRoutingV3",
    "npu_moe_token_unpermute": "aclnnMoeTokenUnpermute",
    "npu_mrope": "aclnnRopeWithSinCosCache",
    "npu_quant_matmul": "aclnnQuantMatmulV5",
    "npu_quantize": "aclnnAscendQuant",
    "npu_recurrent_gated_delta_rule": "aclnnRecurrentGatedDeltaRule",
    "npu_rms_norm": "aclnnRmsNorm",
    "npu_rotary_mul": "aclnnRotaryPositionEmbedding",
    "npu_scatter_nd_update_": "aclnnScatterNdUpdate",
    "npu_scatter_pa_kv_cache": "aclnnScatterPaKvCache",
    "npu_sparse_flash_attention": "aclnnSparseFlashAttention",
    "npu_swiglu": "aclnnSwiGlu",
    "npu_top_k_top_p": "aclnnApplyTopKTopP",
    "npu_transpose_batchmatmul": "aclnnTransposeBatchMatMul",
    "npu_weight_quant_batchmatmul": "aclnnWeightQuantBatchMatmulV2",
}
"""The function that each operator calls in the form that this plugin uses, on A2 and A3."""

MROPE_V2 = "aclnnRopeWithSinCosCacheV2"
"""The function that ``npu_mrope`` needs for interleaved sections. A CANN that has it also guards
the operator's tiling against many heads.
"""

SINCE = {"aclnnChunkGatedDeltaRule": "9.1", MROPE_V2: "9.0"}
"""First release of CANN that has a function; all others are in 8.5."""

OLDEST = "8.5"


def first_release(function: str) -> str:
    return SINCE.get(function, OLDEST)


def release_with(functions: Iterable[str]) -> str:
    return max(map(first_release, functions), key=lambda name: [*map(int, name.split("."))])


def missing_functions(operators: Iterable[str]) -> dict[str, str]:
    """Return the operators that the installed CANN can't serve, each with its missing function."""
    found = {operator: FUNCTIONS[operator] for operator in operators}
    return {operator: function for operator, function in found.items() if is_missing(function)}


@cache
def is_missing(function: str) -> bool:
    """Tell whether CANN lacks the function; False where CANN is not installed."""
    names, libraries = (function, f"{function}GetWorkspaceSize"), _libraries()
    has_it = any(all(hasattr(library, name) for name in names) for library in libraries)
    return bool(libraries) and not has_it


@cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    """Load the libraries in which torch_npu looks, in its order; none without CANN."""
    if _loaded(LIBRARY) is None:
        return ()
    given = os.environ.get("ASCEND_CUSTOM_OPP_PATH", "").split(os.pathsep)
    names = [f"{folder}/{CUSTOM_LIBRARY}" for folder in given if folder]
    if vendors := os.environ.get("ASCEND_OPP_PATH"):
        names += map(str, Path(vendors, "vendors").glob(f"*/{CUSTOM_LIBRARY}"))
    if home := os.environ.get("ASCEND_HOME_PATH"):
        names += map(str, Path(home, "lib64").glob("libopapi_*.so"))
    names += [LIBRARY, *(f"libaclnn_{part}.so" for part in PARTS)]
    return tuple(library for name in names if (library := _loaded(name)) is not None)


def _loaded(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None
