"""Which kernel stands behind ``npu_fused_infer_attention_score``, by release of CANN.

This was read from ``TilingFusedInferAttentionScore``, ``RouteToFia``, ``CheckSpecConditions``,
``IsUsingFAI`` and ``IsUsingIFA`` in CANN's published ops-transformer: tag v8.5.0 for 8.5, branch
9.1.0 for 9.1 (9.0.0 routes TND as 9.1 does). Only calls without sinks and quantisation come here,
in float16 or bfloat16 with K and V of the query's dtype; the references refuse all others. Kernels
are tried in this order: V3, FAI, IFA, PFA. Calls with rope (latent attention) are V3's.
"""

import torch

from ascend_emulator import profiles
from ascend_emulator.operators.fused_arguments import (
    LATENT_HEAD_SIZE,
    FusedAttention,
)

FAI, V3, PFA, IFA = "FAI", "V3", "PFA", "IFA"


def route(fused: FusedAttention, release: str | None = None) -> str:
    """Return the kernel that a call of either version reaches: ``FAI``, ``V3``, ``PFA`` or ``IFA``.

    The ranks and heads of the call were checked. The release is ``8.5`` or ``9.1``; by default it
    is the profile's.
    """
    release = release or profiles.current().release
    if fused.has_rope:  # `isNotLegacyGQA` sends it there before anything else is asked
        return V3
    return _route_of_85(fused) if release == "8.5" else _route_of_91(fused)


def divides_by_zero(fused: FusedAttention) -> bool:
    """Return whether choosing a kernel divides by ``num_key_value_heads``, given as 0, on 9.1."""
    return (
        fused.is_paged
        and not fused.has_rope
        and fused.num_key_value_heads == 0
        and fused.key.dim() == 3
        and fused.is_tnd
        and fused.sparse_mode in (0, 3, 4)
        and _has_equal_heads_for_fai(fused)
    )


def _route_of_91(fused: FusedAttention) -> str:
    if _is_legacy_decode(fused):
        return IFA
    return FAI if _is_fai_of_91(fused) else V3


def _is_legacy_decode(fused: FusedAttention) -> bool:
    """Do what ``IsLegacyTemplatePreferred`` does.

    It prefers one query token with heads of 256, in a layout with a batch axis.
    """
    return (
        fused.input_layout in ("BSH", "BSND", "BNSD")
        and fused.query_width == 1
        and fused.head_size == 256
        and fused.has_equal_heads
        and not fused.is_paged
    )


def _is_fai_of_91(fused: FusedAttention) -> bool:
    grouped = not fused.has_equal_heads and fused.inner_precise == 0
    return (
        fused.is_tnd
        and fused.sparse_mode in (0, 3, 4)
        and (grouped or _has_equal_heads_for_fai(fused))
        and fused.head_size <= 256
        and (not fused.is_paged or _is_cache_of_fai(fused))
    )


def _has_equal_heads_for_fai(fused: FusedAttention) -> bool:
    low_precision = fused.query.dtype == torch.bfloat16 and fused.inner_precise == 1
    full_mask = fused.sparse_mode == 0 and fused.atten_mask is not None
    return fused.has_equal_heads and not low_precision and not full_mask


def _is_cache_of_fai(fused: FusedAttention) -> bool:
    return fused.key.dim() == 3 and fused.key.shape[1] % 16 == 0 and fused.key.shape[1] <= 512


def _route_of_85(fused: FusedAttention) -> str:
    is_fai = _is_fai_of_85(fused)
    # V3 leaves to FAI what it would take, but for paged calls only those of block size 128.
    leaves_to_fai = is_fai and (not fused.is_paged or fused.key.shape[1] == 128)
    if not leaves_to_fai and fused.head_size in (64, 128) and _has_elements(fused):
        return V3
    if is_fai:
        return FAI
    if fused.is_tnd:
        return IFA if fused.head_size == LATENT_HEAD_SIZE else PFA
    return IFA if fused.query_width == 1 and fused.input_layout != "BNSD_BSND" else PFA


def _is_fai_of_85(fused: FusedAttention) -> bool:
    grouped = not fused.has_equal_heads and fused.inner_precise == 0
    equal = (
        fused.has_equal_heads
        and fused.atten_mask is None
        and fused.query.dtype == torch.float16
        and fused.inner_precise == 1
        and not fused.is_paged
    )
    return (
        fused.is_tnd
        and fused.sparse_mode in (0, 3)
        and (grouped or equal)
        and fused.head_size <= 256
        and (not fused.is_paged or _is_cache_of_fai(fused))
    )


def _has_elements(fused: FusedAttention) -> bool:
    return all(tensor.numel() for tensor in (fused.query, fused.key, fused.value))


def unwritten_requests(fused: FusedAttention, kernel: str) -> list[int]:
    """Return the requests whose output rows the kernel leaves as they are.

    The decode kernel of 9.x does not initialise rows of requests without keys:
    `ComputeSeqLenAndDecodeFlagsForFAI` chooses it, ``flash_attention_regular_decode.h`` runs.
    """
    if kernel != FAI or profiles.current().release == "8.5" or not fused.is_paged:
        return []
    lengths = fused.actual_seq_lengths_kv or ()
    query_lens = fused.packed_query_lengths
    is_decode_kernel = (
        set(query_lens) == {1}
        and fused.sparse_mode == 0
        and len(query_lens) >= profiles.cube_cores()
        and fused.block_size == 128
        and not fused.softmax_lse_flag
        and fused.inner_precise == 0
        and fused.num_heads // fused.kv_heads <= 128
    )
    if not is_decode_kernel:
        return []
    return [request for request, length in enumerate(lengths) if length == 0]
