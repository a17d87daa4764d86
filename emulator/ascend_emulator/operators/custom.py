"""References of the custom operators of vllm-ascend (``torch.ops._C_ascend``).

They exist once its extension is loaded: `install` registers those that it has brought. Read from
its sources, csrc/torch_binding.cpp and csrc/kernels/.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from ascend_emulator.operators import (
    elementwise,
    int8,
    lightning_indexer,
    moe_gating,
    sparse_flash_attention,
)
from ascend_emulator.operators.constraint import Call, shape_of
from ascend_emulator.operators.matmul import exact_sums

ADD_RMS_NORM_BIAS = "_C_ascend::npu_add_rms_norm_bias"
GATING_TOP_K = "_C_ascend::moe_gating_top_k"
GEMMA_RMS_NORM = "_C_ascend::npu_gemma_rms_norm"
BGMV_SHRINK = "_C_ascend::bgmv_shrink"
BGMV_EXPAND = "_C_ascend::bgmv_expand"
SGMV_SHRINK = "_C_ascend::sgmv_shrink"
SGMV_EXPAND = "_C_ascend::sgmv_expand"
GROUPED_SWIGLU_QUANT = "_C_ascend::grouped_matmul_swiglu_quant_weight_nz"
DEQUANT_SWIGLU_QUANT = "_C_ascend::npu_dequant_swiglu_quant"
LIGHTNING_INDEXER = "_C_ascend::npu_lightning_indexer"
SPARSE_FLASH_ATTENTION = "_C_ascend::npu_sparse_flash_attention"
FAMILY = "custom operators"
HALF = (torch.float16, torch.bfloat16)
RANKS = (8, 16, 32, 64)
STEP_OF_WIDTH = 64
"""Columns of scaled sums come in multiples of this many."""


def add_rms_norm_bias(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the norm of ``x1 + x2``, to which `beta` is added, its reciprocal, and the sum."""
    normed, reciprocal, total = elementwise.add_rms_norm(x1, x2, gamma, epsilon)
    if beta is not None:
        normed = (normed.float() + beta.float()).to(normed.dtype)
    return normed, reciprocal, total


def gating_top_k(
    x: torch.Tensor,
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
    bias_opt: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do as ``npu_moe_gating_top_k`` does; `renorm` divides weights of a softmax by their sum."""
    weights, ids, scores = moe_gating.gating_top_k(
        x,
        k,
        bias=bias_opt,
        k_group=k_group,
        group_count=group_count,
        group_select_mode=group_select_mode,
        norm_type=norm_type,
        out_flag=out_flag,
        routed_scaling_factor=routed_scaling_factor,
        eps=eps,
    )
    if renorm and norm_type == moe_gating.SOFTMAX:
        total = weights.float().sum(-1, keepdim=True) / routed_scaling_factor
        weights = (weights.float() / (total + eps)).to(weights.dtype)
    return weights, ids, scores


def grouped_matmul_swiglu_quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Multiply int8 rows by their group's weight, and round ``silu(a) * b`` of the two halves.

    Parameters
    ----------
    x
        ``[m, k]``, int8.
    weight
        ``[groups, k, n]``, int8.
    weight_scale
        ``[groups, n]``.
    x_scale
        ``[m]``, float32.
    group_list
        ``[groups]``, int64: where each group ends.

    Returns
    -------
    tuple
        ``[m, n / 2]`` int8 and its scales ``[m]``, float32; undefined past the last group.
    """
    demand = Call(FAMILY, GROUPED_SWIGLU_QUANT).demand
    plain = bias is None and offset is None and not swiglu_limit
    demand("plain swiglu", plain, f"a bias, an offset or limit {swiglu_limit}")
    fits = x.dtype == weight.dtype == torch.int8 and x_scale.dtype == torch.float32
    fits = fits and weight_scale.dtype in (*HALF, torch.float32) and group_list.dtype == torch.int64
    given = x, weight, weight_scale, x_scale, group_list
    demand("dtypes of groups", fits, [each.dtype for each in given])
    fits = x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[1]
    fits = fits and shape_of(weight_scale) == (len(weight), weight.shape[2])
    fits = fits and shape_of(x_scale) == (len(x),) and shape_of(group_list) == (len(weight),)
    fits = fits and x.shape[1] < 65536 and weight.shape[2] <= 10240 and weight.shape[2] % 2 == 0
    demand("shapes of groups", fits, [shape_of(each) for each in given])
    ends = [0, *group_list.tolist()]
    fits = ends == sorted(ends) and ends[-1] <= len(x)
    demand("ends of groups", fits, f"{ends[1:]} for {len(x)} rows")
    output = torch.full((len(x), weight.shape[2] // 2), -128, dtype=torch.int8)
    scales = torch.full((len(x),), torch.nan)
    for group, (start, end) in enumerate(pairwise(ends)):
        if start < end:
            product = exact_sums(x[start:end], weight[group]).float()
            product = product * weight_scale[group].float() * x_scale[start:end, None]
            gate, up = product.chunk(2, -1)
            rounded = int8.round_tokens(torch.nn.functional.silu(gate) * up)
            output[start:end], scales[start:end] = rounded
    return output, scales, None


def dequant_swiglu_quant(
    x: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    activate_left: bool = True,
    quant_mode: int = 0,
    swiglu_mode: int = 0,
    clamp_limit: float = 0.0,
    glu_alpha: float = 1.0,
    glu_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale sums of int8 products, and round ``silu(a) * b`` of the two halves.

    Parameters
    ----------
    x
        ``[m, 2 n]``, int32.
    weight_scale
        ``[2 n]`` or ``[1, 2 n]``, float32.
    activation_scale
        ``[m]``, float32.
    swiglu_mode
        1 also limits both halves, if `clamp_limit` is positive, multiplies the argument of the
        sigmoid by `glu_alpha` and adds `glu_bias` to the second half.

    Returns
    -------
    tuple
        ``[m, n]`` int8 and its scales ``[m]``, float32.
    """
    demand = Call(FAMILY, DEQUANT_SWIGLU_QUANT).demand
    unused = bias, quant_scale, quant_offset, group_index
    plain = all(each is None for each in unused) and activate_left and quant_mode == 1
    demand("plain sums", plain, f"a scale, bias or groups, {activate_left} or {quant_mode}")
    fits = x.dim() == 2 and x.dtype == torch.int32 and x.shape[1] % STEP_OF_WIDTH == 0
    demand("sums", fits, f"{shape_of(x)} {x.dtype}")
    scales: dict[str, tuple[torch.Tensor | None, list[tuple[int, ...]]]] = {
        "weight_scale": (weight_scale, [(x.shape[1],), (1, x.shape[1])]),
        "activation_scale": (activation_scale, [(len(x),)]),
    }
    for name, (scale, shapes) in scales.items():
        fits = scale is not None and scale.dtype == torch.float32 and shape_of(scale) in shapes
        told = None if scale is None else f"{shape_of(scale)} {scale.dtype}"
        demand("scales of sums", fits, told, name)
    assert weight_scale is not None and activation_scale is not None
    fits = swiglu_mode in (0, 1) and 0 <= clamp_limit < math.inf
    fits = fits and math.isfinite(glu_alpha) and math.isfinite(glu_bias)
    told = f"mode {swiglu_mode}, limit {clamp_limit}, {glu_alpha} and {glu_bias}"
    demand("numbers of swiglu", fits, told)
    gate, up = (x.float() * weight_scale.view(-1) * activation_scale[:, None]).chunk(2, -1)
    if swiglu_mode == 1:
        if clamp_limit:
            gate, up = gate.clamp(max=clamp_limit), up.clamp(-clamp_limit, clamp_limit)
        return int8.round_tokens(gate * torch.sigmoid(glu_alpha * gate) * (up + glu_bias))
    return int8.round_tokens(torch.nn.functional.silu(gate) * up)


def bgmv_shrink(
    x: torch.Tensor, weight: torch.Tensor, indices: torch.Tensor, y: torch.Tensor, scale: float
) -> None:
    """Write ``scale * x @ A^T`` of each row's adapter into `y`, but rows with index -1.

    Parameters
    ----------
    x
        ``[T, K]``.
    weight
        ``[adapters, rank, K]``, or with a dimension of 1 after the first.
    indices
        ``[T]``, int64.
    y
        ``[T, rank]``, float32.
    """
    _check(BGMV_SHRINK, x, weight, y, indices, shrinks=True)
    _shrink(x, weight, indices, y, scale)


def bgmv_expand(
    x: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    y: torch.Tensor,
    slice_offset: int,
    slice_size: int,
) -> torch.Tensor:
    """Add ``x @ B^T`` of each row's adapter to some columns of `y`, and return all of it.

    Parameters
    ----------
    x
        ``[T, rank]``, float32.
    weight
        ``[adapters, slice_size, rank]``, or with a dimension of 1 after the first.
    indices
        ``[T]``, int64.
    y
        ``[T, N]``.
    """
    _check(BGMV_EXPAND, x, weight, y, indices, shrinks=False)
    _check_slice(BGMV_EXPAND, x, y, slice_offset, slice_size)
    return _expand(x, weight, indices, y, slice_offset, slice_size)


def sgmv_shrink(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_indices: torch.Tensor,
    seq_len: torch.Tensor,
    y: torch.Tensor,
    scale: float,
) -> None:
    """Do as `bgmv_shrink`, with one index for each request, of as many rows as `seq_len` says."""
    _check(SGMV_SHRINK, x, weight, y, lora_indices, shrinks=True)
    _shrink(x, weight, _by_row(lora_indices, seq_len, len(x)), y, scale)


def sgmv_expand(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_indices: torch.Tensor,
    seq_len: torch.Tensor,
    y: torch.Tensor,
    slice_offset: int,
    slice_size: int,
) -> torch.Tensor:
    """Do as `bgmv_expand`, with one index for each request, of as many rows as `seq_len` says."""
    _check(SGMV_EXPAND, x, weight, y, lora_indices, shrinks=False)
    _check_slice(SGMV_EXPAND, x, y, slice_offset, slice_size)
    return _expand(x, weight, _by_row(lora_indices, seq_len, len(x)), y, slice_offset, slice_size)


def _check(
    operator: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    indices: torch.Tensor,
    shrinks: bool,
) -> None:
    demand = Call(FAMILY, operator).demand
    rows, sums = (x, y) if shrinks else (y, x)
    fits = rows.dtype == weight.dtype in HALF and sums.dtype == torch.float32
    demand("adapter dtypes", fits, f"{rows.dtype}, {weight.dtype} and {sums.dtype}")
    fits = x.dim() == y.dim() == 2 and weight.dim() in (3, 4) and indices.dim() == 1
    demand("adapter shapes", fits and len(x) == len(y), f"{shape_of(x)} and {shape_of(weight)}")
    demand("adapter rank", sums.shape[1] in RANKS, sums.shape[1])
    fits = not shrinks or x.shape[1] > y.shape[1]
    demand("adapter width", fits, f"{shape_of(x)} for {shape_of(y)}")
    demand("adapter indices", indices.dtype == torch.int64, indices.dtype)


def _check_slice(
    operator: str, x: torch.Tensor, y: torch.Tensor, slice_offset: int, slice_size: int
) -> None:
    fits = slice_offset >= 0 and x.shape[1] <= slice_size <= y.shape[1] - slice_offset
    given = f"{slice_size} at {slice_offset} of {shape_of(y)}, rank {x.shape[1]}"
    Call(FAMILY, operator).demand("adapter slice", fits, given)


def _by_row(of_requests: torch.Tensor, lengths: torch.Tensor, rows: int) -> torch.Tensor:
    """Index of each row's adapter; rows after the last request have none."""
    found = torch.repeat_interleave(of_requests[: len(lengths)], lengths)[:rows]
    return torch.cat((found, found.new_full((rows - len(found),), -1)))


def _shrink(
    x: torch.Tensor, weight: torch.Tensor, indices: torch.Tensor, y: torch.Tensor, scale: float
) -> None:
    for adapter in indices.unique().tolist():
        if adapter >= 0:
            rows = indices == adapter
            a = weight[adapter].reshape(-1, x.shape[1]).float()
            y[rows] = scale * (x[rows].float() @ a.t())


def _expand(
    x: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    y: torch.Tensor,
    slice_offset: int,
    slice_size: int,
) -> torch.Tensor:
    columns = slice(slice_offset, slice_offset + slice_size)
    of_all = weight.reshape(-1, x.shape[1]).float()
    for adapter in indices.unique().tolist():
        if adapter >= 0:
            rows = indices == adapter
            b = of_all[adapter * slice_size :][:slice_size]  # the kernel asks for no other size
            unknown = b.new_full((slice_size - len(b), x.shape[1]), torch.nan)
            b = torch.cat((b, unknown))
            total = y[rows, columns].float() + x[rows].float() @ b.t()
            y[rows, columns] = total.to(y.dtype)
    return y


REFERENCES: dict[str, Callable[..., Any]] = {
    ADD_RMS_NORM_BIAS: add_rms_norm_bias,
    GATING_TOP_K: gating_top_k,
    GEMMA_RMS_NORM: elementwise.gemma_rms_norm,
    GROUPED_SWIGLU_QUANT: grouped_matmul_swiglu_quant,
    DEQUANT_SWIGLU_QUANT: dequant_swiglu_quant,
    BGMV_SHRINK: bgmv_shrink,
    BGMV_EXPAND: bgmv_expand,
    SGMV_SHRINK: sgmv_shrink,
    SGMV_EXPAND: sgmv_expand,
    LIGHTNING_INDEXER: lightning_indexer.lightning_indexer,
    SPARSE_FLASH_ATTENTION: partial(
        sparse_flash_attention.sparse_flash_attention,
        attention_mode=sparse_flash_attention.ABSORBED,  # its default, unlike torch_npu's
    ),
}
"""References by operator."""

BLOCKS = {"block_ids": ("block_table",)}
HOW: dict[str, dict[str, Any]] = {
    LIGHTNING_INDEXER: {"paged": ("key",), **BLOCKS},
    SPARSE_FLASH_ATTENTION: {"paged": ("key", "value", "key_rope"), **BLOCKS},
}
"""Of operators that read caches in blocks, how they are registered."""


def install(register_reference: Callable[..., object]) -> None:
    """Register the references of those operators that the extension has."""
    for name, function in REFERENCES.items():
        if hasattr(torch.ops._C_ascend, name.split("::")[1]):
            register_reference(name, function, **HOW.get(name, {}))
