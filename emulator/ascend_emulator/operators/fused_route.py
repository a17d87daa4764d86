"""Which kernel stands behind ``npu_fused_infer_attention_score``, by release of CANN.

This was read from ``TilingFusedInferAttentionScore``, ``RouteToFia``, ``CheckSpecConditions``,
``IsUsingFAI`` and ``IsUsingIFA`` in CANN's published ops-transformer: tag v8.5.0 for 8.5, branch
9.1.0 for 9.1 (9.0.0 routes TND as 9.1 does). Only calls without sinks and quantisation come here,
in float16 or bfloat16 with K and V of the query's dtype; the references refuse all others. Kernels
are tried in this order: V3, FAI, IFA, PFA. Calls with rope (latent attention) are V3's.
"""

from typing import NamedTuple

import torch

from ascend_emulator import profiles
from ascend_emulator.operators.constraint import KernelRefusalError
from ascend_emulator.operators.fused_arguments import (
    LATENT_HEAD_SIZE,
    V2_NAMES,
    FusedAttention,
    bind,
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


class Verdict(NamedTuple):
    """What becomes of a call.

    Attributes
    ----------
    kernel
        ``FAI``, ``V3``, ``PFA`` or ``IFA``.
    accepted
        Whether it meets every demand.
    constraint
        Family and name of the record that is broken.
    reason
        The refusal, empty if accepted.
    undefined
        Requests whose rows the kernel leaves unwritten.
    """

    kernel: str
    accepted: bool
    constraint: tuple[str, str] | None = None
    reason: str = ""
    undefined: tuple[int, ...] = ()


class _Form(NamedTuple):
    paged: bool
    sparse_mode: int
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


FORMS = {
    "prompt": _Form(False, 3, (5, 7), (5, 7)),
    "decode": _Form(True, 0, (1, 1), (40, 300)),
    "chunk": _Form(True, 3, (5, 1), (45, 300)),
    "window": _Form(False, 4, (5, 7), (5, 7)),
    "paged window": _Form(True, 4, (5, 1), (45, 300)),
    "encoder": _Form(False, 0, (5, 7), (5, 7)),
}
"""Forms of call over TND that a model needs, with the lengths of a typical step."""


def explain(
    profile: str,
    *,
    form: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_size: int,
    block_size: int = 0,
    query_lens: list[int] | None = None,
    kv_lens: list[int] | None = None,
    num_blocks: int | None = None,
    inner_precise: int = 0,
    softmax_lse: bool = False,
    version: int = 1,
    cache_rank: int = 3,
) -> Verdict:
    """Say which kernel a call reaches in a profile, and whether it takes it.

    The call goes through the checks of the references, with tensors that have no memory.

    Parameters
    ----------
    form
        One of `FORMS`.
    block_size
        Block size of the cache, for the paged forms.
    query_lens, kv_lens
        Lengths of each request, not cumulative; those of `FORMS` by default.
    num_blocks
        Blocks of the cache; one more than all requests have together by default. Requests share
        blocks when there are fewer.
    version, cache_rank
        1 or 2 for v1 or v2; a cache of rank 3 or 4.
    """
    from ascend_emulator.operators.fused_checks import check

    paged, sparse_mode, *lengths = FORMS[form]
    query_lens = list(query_lens or lengths[0])
    kv_lens = list(kv_lens or lengths[1])
    if paged:
        blocks = [-(-length // max(block_size, 1)) for length in kv_lens]
        num_blocks = num_blocks or sum(blocks) + 1
        ids = torch.arange(len(blocks) * max(blocks), dtype=torch.int32) % num_blocks
        cache = (
            (num_blocks, block_size, kv_heads * head_size)
            if cache_rank == 3
            else (num_blocks, kv_heads, block_size, head_size)
        )
        keys = {
            "block_table": ids.view(len(blocks), -1),
            "block_size": block_size,
            "actual_seq_lengths_kv": kv_lens,
        }
    else:
        cache = (sum(kv_lens), kv_heads, head_size)
        keys = {"actual_seq_lengths_kv": _cumulative(kv_lens)}
    arguments = {
        "query": torch.empty(sum(query_lens), heads, head_size, dtype=dtype, device="meta"),
        "key": torch.empty(cache, dtype=dtype, device="meta"),
        "value": torch.empty(cache, dtype=dtype, device="meta"),
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "input_layout": "TND",
        "sparse_mode": sparse_mode,
        "actual_seq_lengths": _cumulative(query_lens),
        "inner_precise": inner_precise,
        "softmax_lse_flag": softmax_lse,
        **keys,
    }
    if sparse_mode:
        arguments["atten_mask"] = torch.empty(2048, 2048, dtype=torch.int8, device="meta")
    if sparse_mode == 4:
        arguments |= {"pre_tokens": 15, "next_tokens": 0}
    name = "npu::npu_fused_infer_attention_score"
    if version == 2:
        name += "_v2"
        arguments = {V2_NAMES.get(key, key): value for key, value in arguments.items()}
    fused, _ = bind(name, "", (), arguments)
    with profiles.using(profile):
        kernel = route(fused)
        try:
            check(fused)
        except KernelRefusalError as refusal:
            return Verdict(kernel, False, refusal.constraint.key, str(refusal))
        return Verdict(kernel, True, undefined=tuple(unwritten_requests(fused, kernel)))


def _cumulative(lengths: list[int]) -> list[int]:
    return torch.tensor(lengths).cumsum(0).tolist()
