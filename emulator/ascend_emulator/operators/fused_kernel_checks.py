"""What the kernel that a call reaches refuses, and what the documentation refuses beyond it.

Every demand is a record of the family of that name in ``constraints/``.
"""

from collections.abc import Callable

import torch

from ascend_emulator import profiles
from ascend_emulator.operators.fused_arguments import Demand, FusedAttention
from ascend_emulator.operators.fused_rope import check_documented_rope
from ascend_emulator.operators.fused_route import divides_by_zero, route

MOST_LENGTHS = 4096


def check_kernel(fused: FusedAttention) -> str:
    """Refuse what this profile's kernel refuses, and return its name.

    Raises
    ------
    KernelRefusalError
        If a demand is not met; it names the constraint.
    """
    profile = profiles.current()
    if profile.release != "8.5":
        given = "0 for a paged cache of rank 3"
        fused.demand_of("route")("zero heads of a paged cache", not divides_by_zero(fused), given)
    kernel = route(fused)
    if kernel in CHECKS:  # FAI demands nothing beyond what every kernel demands
        CHECKS[kernel](fused, fused.demand_of(kernel))
    if profile.documentation:
        _check_documentation(fused, fused.demand_of("documentation"))
        check_documented_rope(fused)
    return kernel


def _check_v3(fused: FusedAttention, demand: Demand) -> None:
    size = fused.head_size
    if fused.has_rope:
        return  # `fused_rope` has what it demands with rope
    if fused.is_tnd:
        allowed = (64, 128) if profiles.current().release == "8.5" else (64, 128, 192)
        demand("head size of V3", size in allowed, size)
    if fused.is_paged:
        step, most = 16, 1024
        if size not in (64, 128):
            step, most = (128, 1024) if fused.query_width > 1 else (16, 512)
        block = fused.block_size
        fits = block % step == 0 and 0 < block <= most
        demand("block size of V3", fits, f"{block} for a head size of {size}")


def _check_pfa(fused: FusedAttention, demand: Demand) -> None:
    size = fused.head_size
    if fused.is_tnd:
        demand("dtype of PFA", fused.query.dtype == torch.bfloat16, fused.query.dtype)
        demand("head size of PFA", size in (64, 128, 192), size)
        given = f"{fused.num_heads} and {fused.kv_heads} heads of {size}"
        demand("grouped heads of 192", size != 192 or fused.has_equal_heads, given)
        demand("window of 192", fused.sparse_mode != 4 or size != 192, f"a head size of {size}")
        count = len(fused.actual_seq_lengths or ())
        demand("lengths in PFA", count <= MOST_LENGTHS, f"{count} lengths")
    if fused.is_paged:
        block = fused.block_size
        demand("block size of PFA", block % 128 == 0 and 0 < block <= 1024, block)
        used, cached = fused.blocks_in_use, fused.key.shape[0]
        demand("some keys", used > 0, "no keys at all")
        demand("sum of blocks in PFA", used <= cached, f"{used} blocks in a cache of {cached}")


def _check_ifa(fused: FusedAttention, demand: Demand) -> None:
    demand("head size 512 without rope", not fused.is_tnd, f"a head size of {fused.head_size}")
    if fused.is_paged:
        block = fused.block_size
        demand("block size of IFA", block % 16 == 0 and 0 < block <= 512, block)


CHECKS: dict[str, Callable[[FusedAttention, Demand], None]] = {
    "V3": _check_v3,
    "PFA": _check_pfa,
    "IFA": _check_ifa,
}


def _check_documentation(fused: FusedAttention, demand: Demand) -> None:
    for argument in ("query", "query_rope"):
        tensor = getattr(fused, argument)
        fits = tensor is None or tensor.is_contiguous()
        demand("contiguous query", fits, tensor is not None and tensor.stride(), argument)
    if fused.block_table is not None:
        used, cached = fused.blocks_in_use, fused.key.shape[0]
        demand("sum of blocks", used <= cached, f"{used} blocks in a cache of {cached}")
        rows, requests = len(fused.block_table), fused.batch_size
        demand("rows of the table", rows == requests, f"{rows} rows, {requests} requests")
    if not fused.is_tnd:
        return
    count = len(fused.actual_seq_lengths or ())
    demand("number of lengths", count <= MOST_LENGTHS, f"{count} lengths")
    precise = fused.has_equal_heads and fused.query.dtype == torch.float16
    given = f"{fused.inner_precise} for {fused.num_heads} and {fused.kv_heads} heads"
    demand("inner_precise of TND", fused.inner_precise <= int(precise), given)
    if fused.sparse_mode == 3:
        pairs = list(zip(fused.packed_query_lengths, fused.packed_kv_lengths))
        enough = all(query <= keys for query, keys in pairs)
        demand("keys for every query of mode 3", enough, f"{pairs} (query, key)")
    if fused.is_paged and not fused.has_rope:
        block = fused.block_size
        fits = block % 16 == 0 and 0 < block <= 128
        fits = fits and (fused.query_width <= 1 or block == 128)
        given = f"{block} for requests of up to {fused.query_width} query tokens"
        demand("block size of TND", fits, given)
