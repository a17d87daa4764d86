"""What every kernel behind fused attention refuses: the records of ``fused_attention.toml``."""

from collections.abc import Sequence

import torch

from ascend_emulator import profiles
from ascend_emulator.operators.attention import COMPRESSED_SIZE
from ascend_emulator.operators.constraint import shape_of
from ascend_emulator.operators.fused_arguments import FusedAttention
from ascend_emulator.operators.fused_kernel_checks import check_kernel
from ascend_emulator.operators.fused_rope import check_rope
from ascend_emulator.operators.fused_route import FAI, route

RANKS = {"BSH": 3, "BSND": 4, "BNSD": 4, "BNSD_BSND": 4, "BNSD_NBSD": 4, "TND": 3, "TND_NTD": 3}
DTYPES = (torch.float16, torch.bfloat16)
MASK_DTYPES = (torch.bool, torch.int8, torch.uint8)
COMPRESSED_MODES = (2, 3, 4)
INT32_MAX = 2**31 - 1


def check(fused: FusedAttention) -> None:
    """Refuse what the kernel would refuse.

    Raises
    ------
    KernelRefusalError
        If a demand is not met; it names the constraint.
    """
    _check_modes(fused)
    _check_tensors(fused)
    _check_heads(fused)
    check_rope(fused)
    if fused.is_tnd:
        _check_packed_lengths(fused)
    else:
        _check_query_lengths(fused)
    if fused.is_paged:
        _check_cache(fused)
        _check_paged_lengths(fused)
    else:
        _check_fresh(fused)
    _check_sparse(fused)
    _check_mask(fused)
    check_kernel(fused)


def _check_modes(fused: FusedAttention) -> None:
    demand = fused.call.demand
    for argument, value in fused.unsupported.items():
        demand("unsupported argument", False, _describe(value), argument)
    demand("layout", fused.input_layout in RANKS, repr(fused.input_layout))
    demand("inner_precise", fused.inner_precise in range(4), fused.inner_precise)
    demand("sparse_mode", fused.sparse_mode in range(5), fused.sparse_mode)


def _check_tensors(fused: FusedAttention) -> None:
    demand = fused.call.demand
    rank = RANKS[fused.input_layout]
    demand("rank", fused.query.dim() == rank, shape_of(fused.query))
    named = {"query": fused.query, "key": fused.key, "value": fused.value}
    for argument, tensor in named.items():
        demand("dtype", tensor.dtype in DTYPES, tensor.dtype, argument)
        is_copied = argument == "query" or profiles.current().release == "8.5"
        fits = is_copied or tensor.is_contiguous()
        demand("contiguous", fits, f"strides {tensor.stride()}", argument)
        demand("same dtype", tensor.dtype == fused.query.dtype, tensor.dtype, argument)
        if not fused.is_paged:
            demand("rank of key", tensor.dim() == rank, shape_of(tensor), argument)
    demand(
        "key and value shapes",
        fused.key.shape == fused.value.shape,
        f"{shape_of(fused.key)} and {shape_of(fused.value)}",
    )
    limit = 65536 if fused.version == 1 else 1 << 20
    if fused.is_tnd:
        demand("tokens", fused.query.shape[0] <= limit, shape_of(fused.query))
    if fused.input_layout == "BNSD_BSND":
        demand("BNSD_BSND", fused.query_width > 1, f"Q_S {fused.query_width}")


def _check_heads(fused: FusedAttention) -> None:
    demand = fused.call.demand
    heads, kv_heads = fused.num_heads, fused.kv_heads
    axis = {"BSND": 2}.get(fused.input_layout, 1)
    if fused.input_layout == "BSH":
        width = fused.query.shape[2]
        demand("num_heads", heads > 0 and width % heads == 0, f"{heads} for H {width}")
        head_size = width // heads
    else:
        demand("num_heads", heads == fused.query.shape[axis], f"{heads}, {shape_of(fused.query)}")
        head_size = fused.query.shape[-1]
    demand("head limit", heads <= 256, heads)
    demand(
        "num_key_value_heads",
        kv_heads > 0 and heads % kv_heads == 0 and (heads // kv_heads <= 64 or fused.is_absorbed),
        f"{kv_heads} for {heads} heads",
    )
    demand("head size", 0 < head_size <= 512 and head_size % 16 == 0, head_size)
    if fused.input_layout in ("BSH", "BSND") and fused.query_width > 1:
        demand("row width", heads * head_size < 65535, f"{heads} * {head_size}")
    if not fused.is_paged:
        shape = shape_of(fused.key)
        if fused.input_layout == "BSH":
            matches = shape[2] == kv_heads * head_size
        else:
            matches = shape[axis] == kv_heads and shape[-1] == head_size
        demand("heads of key", matches, f"{shape} for {kv_heads} heads of {head_size}")


def _is_host_list(lengths: object) -> bool:
    return isinstance(lengths, list | tuple) and all(type(n) is int for n in lengths)


def _check_host_lists(fused: FusedAttention) -> None:
    for argument in ("actual_seq_lengths", "actual_seq_lengths_kv"):
        lengths = getattr(fused, argument)
        ok = lengths is None or _is_host_list(lengths)
        fused.call.demand("host lengths", ok, _describe(lengths), argument)


def _check_packed_lengths(fused: FusedAttention) -> None:
    demand = fused.call.demand
    _check_host_lists(fused)
    for argument in ("actual_seq_lengths", "actual_seq_lengths_kv"):
        demand("lengths required", getattr(fused, argument) is not None, None, argument)
    lengths, kv_lengths = fused.actual_seq_lengths, fused.actual_seq_lengths_kv
    assert lengths is not None and kv_lengths is not None
    demand("requests", 0 < len(lengths) <= 65536, f"{len(lengths)} lengths")
    demand("cumulative lengths", _is_cumulative(lengths), list(lengths))
    tokens = fused.query.shape[0]
    demand("last length", lengths[-1] == tokens, f"{lengths[-1]} for T {tokens}")
    demand("equal counts", len(lengths) == len(kv_lengths), f"{len(lengths)}, {len(kv_lengths)}")


def _is_cumulative(lengths: Sequence[int]) -> bool:
    return all(a <= b for a, b in zip([0, *lengths], lengths))


def _check_query_lengths(fused: FusedAttention) -> None:
    demand = fused.call.demand
    _check_host_lists(fused)
    demand("requests", 0 < fused.batch_size <= 65536, f"batch {fused.batch_size}")
    if fused.actual_seq_lengths is not None and fused.query_width > 1:
        _check_count(fused, "actual_seq_lengths", fused.actual_seq_lengths)
        lengths = fused.query_lengths()
        fits = all(0 <= n <= fused.query_width for n in lengths)
        demand("lengths in query", fits, f"{lengths} for Q_S {fused.query_width}")


def _check_count(fused: FusedAttention, argument: str, lengths: Sequence[int]) -> None:
    ok = len(lengths) == 1 or len(lengths) >= fused.batch_size
    given = f"{len(lengths)} lengths for batch {fused.batch_size}"
    fused.call.demand("count of lengths", ok, given, argument)


def _check_fresh(fused: FusedAttention) -> None:
    demand = fused.call.demand
    if fused.is_tnd:
        lengths = fused.actual_seq_lengths_kv
        assert lengths is not None
        rows = fused.key.shape[0]
        ok = _is_cumulative(lengths) and lengths[-1] == rows
        demand("cumulative kv lengths", ok, f"{list(lengths)} for {rows} rows of key")
        return
    demand("batch of key", fused.key.shape[0] == fused.batch_size, shape_of(fused.key))
    width = fused.key.shape[2 if fused.input_layout.startswith("BNSD") else 1]
    if fused.actual_seq_lengths_kv is not None:
        _check_count(fused, "actual_seq_lengths_kv", fused.actual_seq_lengths_kv)
        lengths = fused.kv_lengths(width)
        demand("lengths in key", all(0 <= n <= width for n in lengths), f"{lengths} of {width}")


def _check_cache(fused: FusedAttention) -> None:
    demand = fused.call.demand
    shape, size = shape_of(fused.key), fused.block_size
    head_size = fused.head_size
    width = fused.kv_heads * head_size
    forms: dict[int, tuple[int, ...]] = {3: (shape[0], size, width)}
    if fused.is_tnd or fused.input_layout.startswith("BNSD"):
        forms[4] = (shape[0], fused.kv_heads, size, head_size)
    expected = " or ".join(str(("num_blocks", *form[1:])) for form in forms.values())
    demand("cache form", forms.get(len(shape)) == shape, f"{shape}, expected {expected}")
    if len(shape) == 3:
        demand("cache row width", width <= 65535, width)
    demand("cache elements", fused.key.numel() <= INT32_MAX, fused.key.numel())
    demand("block size", size % 16 == 0 and 0 < size <= 1024, size)


def _check_paged_lengths(fused: FusedAttention) -> None:
    demand = fused.call.demand
    table = fused.block_table
    assert table is not None
    demand("block table", table.dtype == torch.int32 and table.dim() == 2, _describe(table))
    demand("block table contiguous", table.is_contiguous(), f"strides {table.stride()}")
    demand("kv lengths required", fused.actual_seq_lengths_kv is not None, None)
    assert fused.actual_seq_lengths_kv is not None
    rows, needed = table.shape[0], fused.batch_size
    if route(fused) == FAI:
        with_keys = [row for row, length in enumerate(fused.actual_seq_lengths_kv) if length]
        needed = 1 + max(with_keys, default=-1)
    fits = needed <= rows <= fused.batch_size
    demand("block table rows", fits, f"{rows} rows, {fused.batch_size} requests")
    if not fused.is_tnd:
        _check_count(fused, "actual_seq_lengths_kv", fused.actual_seq_lengths_kv)
    room = table.shape[1] * fused.block_size
    lengths = fused.kv_lengths(room) if not fused.is_tnd else list(fused.actual_seq_lengths_kv)
    fits = all(0 <= n <= room for n in lengths)
    demand("kv lengths in table", fits, f"{lengths}, a row holds {room} tokens")
    used = torch.cat([row[: -(-n // fused.block_size)] for row, n in zip(table, lengths)])
    ok = bool(((used >= 0) & (used < fused.key.shape[0])).all())
    demand("block ids", ok, f"{used.tolist()} of {fused.key.shape[0]} blocks")


def _check_sparse(fused: FusedAttention) -> None:
    demand = fused.call.demand
    mode = fused.sparse_mode
    if fused.is_tnd:
        allowed = mode in (3, 4) or (mode == 0 and fused.atten_mask is None)
        given = f"mode {mode} {'without' if fused.atten_mask is None else 'with'} a mask"
        demand("sparse modes of TND", allowed, given)
        query_lens, kv_lens = fused.packed_query_lengths, fused.packed_kv_lengths
    else:
        one_token = fused.query_width == 1 and mode in COMPRESSED_MODES
        demand("sparse modes of one token", not one_token, mode)
        query_lens = fused.query_lengths()
        kv_lens = fused.kv_lengths(fused.key.shape[2 if fused.input_layout[:2] == "BN" else 1])
    if mode in (3, 4):
        # A padding request of a full graph has query tokens and no keys; its output is zero.
        lengths = list(zip(query_lens, kv_lens))
        ok = all(query <= kv or kv == 0 for query, kv in lengths)
        demand("as many keys as queries", ok, f"{lengths} (query, key)")
    if mode == 4:
        pre, after = fused.pre_tokens, fused.next_tokens
        demand("band is not empty", pre + after >= 0, f"pre_tokens {pre}, next_tokens {after}")
        reaches = all(pre >= -q and after >= -k for q, k in zip(query_lens, kv_lens))
        demand("band reaches the keys", reaches, f"pre_tokens {pre}, next_tokens {after}")


def _check_mask(fused: FusedAttention) -> None:
    demand = fused.call.demand
    mask = fused.atten_mask
    demand("mask required", mask is not None or fused.sparse_mode == 0, None)
    if mask is None:
        return
    demand("mask dtype", mask.dtype in MASK_DTYPES, mask.dtype)
    demand("mask contiguous", mask.is_contiguous(), f"strides {mask.stride()}")
    shape = shape_of(mask)
    if fused.sparse_mode in COMPRESSED_MODES:
        square = (COMPRESSED_SIZE, COMPRESSED_SIZE)
        demand("compressed mask shape", shape in (square, (1, *square), (1, 1, *square)), shape)
        return
    batch, rows = fused.batch_size, fused.query_width
    if len(shape) == 2:
        fits = shape[0] == batch if rows == 1 else _aligned(shape[0], rows)
    else:
        leading = [(1,), (1, 1), (batch, 1)]
        fits = shape[:-2] in leading and _aligned(shape[-2], rows)
    if fused.is_paged:
        assert fused.block_table is not None
        columns = fused.block_table.shape[1] * fused.block_size
        fits = fits and shape[-1] >= columns
    else:
        columns = fused.key.shape[2 if fused.input_layout.startswith("BNSD") else 1]
        fits = fits and _aligned(shape[-1], columns)
    demand("full mask shape", fits, f"{shape} for {batch} requests, {rows} rows, {columns} columns")


def _aligned(size: int, wanted: int) -> bool:
    """Return whether a size is the wanted one, or the wanted one rounded up to 16 or 32."""
    return size in (wanted, -(-wanted // 16) * 16, -(-wanted // 32) * 32)


def check_out(
    fused: FusedAttention, workspace: torch.Tensor | None, out: Sequence[torch.Tensor]
) -> None:
    demand = fused.call.demand
    if workspace is not None:
        ok = workspace.dim() == 1 and workspace.dtype == fused.query.dtype
        demand("workspace", ok, _describe(workspace))
        needed = workspace_elements(fused.query)
        given = f"{workspace.numel()} elements, needed {needed}"
        demand("workspace size", workspace.numel() >= needed, given)
    demand("out", len(out) == 2, f"{len(out)} tensors")
    ok = shape_of(out[0]) == fused.output_shape and out[0].dtype == fused.query.dtype
    demand("attention_out", ok and out[0].is_contiguous(), _describe(out[0]))
    if fused.softmax_lse_flag:
        ok = shape_of(out[1]) == fused.lse_shape and out[1].dtype == torch.float32
        demand("softmax_lse out", ok, _describe(out[1]))


def workspace_elements(query: torch.Tensor) -> int:
    """Return the number of elements of a workspace.

    What real kernels need is not documented. This grows with the query, so that a workspace that
    was sized for a smaller batch is found too small.
    """
    return max(1, query.numel())


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {shape_of(value)} {value.dtype} on {value.device}"
    return repr(value)
