"""torch's own form of operators of torch_npu: the same arguments and results, by plain operators.

`verify-device` times a form beside its operator, and an engine takes it for calls that a table says
this device gets wrong, or slower. These are the forms that layers take where a fused operator is
switched off, as far as vLLM or this plugin has one. None of them waits for the device or depends on
what tensors hold, so a graph may capture them. A result that no layer reads is left empty.

Attention, cache writes, and products of experts, whose sizes only the device knows, have none.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import gelu
from vllm import ir
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import grouped_topk
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from vllm_npu_prep.ops.moe_topk import topk_softmax
from vllm_npu_prep.ops.npu.rotary import columns_of_sections
from vllm_npu_prep.quantization.int8 import EXACT_COLUMNS, quantize_all, quantize_tokens
from vllm_npu_prep.verify.calls.call import Call

Tensor = torch.Tensor

DTYPES = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
"""By torch's numbers for them, which the dispatcher hands to operators of torch_npu."""

SIGMOID = 1
"""``norm_type`` of a choice of experts whose scores are sigmoids."""


def _native(name: str) -> Callable[..., Any]:
    """Return vLLM's own form of an operator of its IR."""
    return getattr(ir.ops, name).impls["native"].impl_fn


def _rounded(values: Tensor, scale: Tensor | None, offset: Tensor | None) -> tuple[Tensor, Tensor]:
    """Round to int8: by a scale and an offset, or with a scale of its own for each row."""
    if scale is None or offset is None:
        return quantize_tokens(values)
    return quantize_all(values, scale.float(), offset.float()), _unread(values)


def _unread(x: Tensor) -> Tensor:
    return x.new_empty(0)


def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return _native("rms_norm")(input, gamma, epsilon), _unread(input)


def gemma_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return rms_norm(input, gamma.float() + 1, epsilon)


def add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    normed, total = _native("fused_add_rms_norm")(x1, x2, gamma, epsilon)
    return normed, _unread(x1), total


def add_rms_norm_cast(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    normed, unread, total = add_rms_norm(x1, x2, gamma, epsilon)
    return normed.float(), normed, unread, total


def _normed_sum(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the norm in float32, because it is rounded to int8 next, and the sum."""
    total = x1 + x2
    return rms_norm(total.float(), gamma.float(), epsilon)[0], total


def add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    smooth_scale1: Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    normed, total = _normed_sum(x1, x2, gamma, epsilon)
    if smooth_scale1 is not None:
        normed = normed * smooth_scale1.float()
    values, scale = _rounded(normed, None, None)
    return values, _unread(values), total, scale, _unread(scale)


def add_rms_norm_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    scales1: Tensor,
    zero_points1: Tensor,
    *,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    normed, total = _normed_sum(x1, x2, gamma, epsilon)
    values, _ = _rounded(normed, scales1, zero_points1)
    return values, _unread(values), total


def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    return SiluAndMul.forward_native(input)


def exact_gelu(x: Tensor) -> Tensor:
    """Compute GELU by the error function: torch's own on NPUs is the approximation by tanh."""
    wide = x.float()
    return (wide / 2 * (1 + torch.erf(wide / math.sqrt(2)))).to(x.dtype)


def one_gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    return exact_gelu(input) if approximate == "none" else gelu(input, approximate=approximate)


def geglu(
    input: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[Tensor, Tensor]:
    gate, up = input.chunk(2, dim) if activate_left else input.chunk(2, dim)[::-1]
    activated = one_gelu(gate, approximate="tanh" if approximate else "none")
    return activated * up, _unread(input)


def dequant_swiglu_quant(
    x: Tensor,
    *,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
) -> tuple[Tensor, Tensor]:
    wide = x.float()
    product = swiglu(wide if activate_left else torch.cat(wide.chunk(2, -1)[::-1], -1))
    return _rounded(product, quant_scale, quant_offset)


def dynamic_quant(input: Tensor) -> tuple[Tensor, Tensor]:
    return _rounded(input, None, None)


def quantize(
    input: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    dtype: Any,
    axis: int = 1,
    div_mode: bool = True,
) -> Tensor:
    return _rounded(input, scales, zero_points)[0]


def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int,
    group_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Sum products in float32, `EXACT_COLUMNS` of them exactly: NPUs don't multiply float64.

    Beside packed weights of four bits, `offset` is for the kernel, which cuts rows in two.
    """
    del offset, group_sizes
    if x2.dtype == torch.int32:
        assert pertoken_scale is not None
        return (_by_groups(x1, x2, scale) * pertoken_scale).to(DTYPES[output_dtype])
    parts = zip(x1.split(EXACT_COLUMNS, 1), x2.split(EXACT_COLUMNS, 0))
    product = sum(rows.float() @ columns.float() for rows, columns in parts)
    assert isinstance(product, Tensor)
    if scale.dtype == torch.int64:  # the bits of float32
        scale = _scales_in(scale)
    is_of_sums = bias is not None and bias.dtype == torch.int32
    if bias is not None and is_of_sums:
        product = product + bias
    product = product * scale.float()
    if pertoken_scale is not None:
        product = product * pertoken_scale[:, None]
    if bias is not None and not is_of_sums:
        product = product + bias
    return product.to(DTYPES[output_dtype])


def _by_groups(x: Tensor, words: Tensor, scale: Tensor) -> Tensor:
    """Multiply by weights of four bits ``[K, N / 8]`` with scales ``[G, N]`` of groups."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=x.device)
    levels = (((words[..., None] >> shifts) & 15 ^ 8) - 8).flatten(1)  # [K, N]
    rows = x.float().unflatten(1, (len(scale), -1)).transpose(0, 1)  # [G, T, K / G]
    sums = torch.bmm(rows, levels.float().unflatten(0, (len(scale), -1)))
    return (sums * _scales_in(scale)[:, None]).sum(0)


def _scales_in(bits: Tensor) -> Tensor:
    """Return the float32 whose bits are the lower halves of int64; a cast might saturate."""
    return bits.view(torch.int32)[..., ::2].view(torch.float32)


def mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[Tensor, Tensor]:
    rows, size = positions, cos_sin_cache.shape[1]
    if positions.dim() == 2:
        sections = tuple(mrope_section or ())
        columns = columns_of_sections(sections, cache_mode == "interleave").to(positions.device)
        of_sections = cos_sin_cache[positions]
        cos_sin_cache = of_sections.gather(0, columns.expand(1, *of_sections.shape[1:]))[0]
        rows = torch.arange(len(query), device=positions.device)
    rotated, rotated_key = RotaryEmbedding.forward_static(
        rows,
        query.float().contiguous(),  # float32, as the operator computes, and no slice
        key.float().contiguous(),
        head_size,
        size,
        cos_sin_cache.float(),
        rotary_mode == "half",
    )
    assert rotated_key is not None
    return rotated.to(query.dtype), rotated_key.to(key.dtype)


def rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    is_neox = rotary_mode == "half"
    half = slice(0, r1.shape[-1] // 2) if is_neox else slice(0, None, 2)
    cos, sin = (factors[0, :, 0, half] for factors in (r1, r2))
    return ApplyRotaryEmb.forward_static(input, cos, sin, is_neox, enable_fp32_compute=True)


def grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
) -> list[Tensor]:
    """Multiply each input by its own weight."""
    products = [rows @ columns for rows, columns in zip(x, weight)]
    return [p + b.to(p.dtype) for p, b in zip(products, bias)] if bias else products


def transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
) -> Tensor:
    rows, weights = input.permute(*(perm_x1 or (0, 1, 2))), weight.permute(*(perm_x2 or (0, 1, 2)))
    return torch.bmm(rows, weights).permute(*(perm_y or (1, 0, 2))).contiguous()


def gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    norm_type: int = 0,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    is_sigmoid, logits = norm_type == SIGMOID, x.float()
    choose = inspect.unwrap(grouped_topk)  # a kernel is no place to compile in
    weights, ids = choose(
        x,
        logits,
        k,
        is_sigmoid,
        group_count,
        k_group,
        "sigmoid" if is_sigmoid else "softmax",
        routed_scaling_factor,
        bias,
    )
    scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    order = choice.gather(1, ids.long()).argsort(-1, descending=True)  # the best comes first
    return weights.gather(1, order).to(x.dtype), ids.gather(1, order), _unread(x)


def gating_top_k_softmax(
    x: Tensor, *, k: int = 1, finished: Tensor | None = None, renorm: int | None = 0
) -> tuple[Tensor, Tensor, Tensor]:
    weights = x.new_empty(len(x), k)
    ids = x.new_empty(len(x), k, dtype=torch.int32)
    topk_softmax(weights, ids, ids, x, bool(renorm), None, None)
    if finished is not None:
        ids = ids.masked_fill(finished[:, None], x.shape[-1])
    return weights, ids, _unread(x)


def finalize_routing(
    expanded_permuted_rows: Tensor,  # [T * k, 1, hidden_size]
    skip1: None,
    skip2: None,
    bias: None,
    scales: Tensor | None,  # [T, k]
    expanded_src_to_dst_row: Tensor,  # [T * k], -1 for a pair without a row
    export_for_source_row: None,
    drop_pad_mode: int | None = 0,
) -> Tensor:
    return _sums(expanded_permuted_rows[:, 0], expanded_src_to_dst_row, scales)


def token_unpermute(
    permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return _sums(permuted_tokens, sorted_indices, probs), _unread(permuted_tokens)


def _sums(rows: Tensor, row_of_pair: Tensor, scales: Tensor | None) -> Tensor:
    """Add each token's rows in float32; a pair without a row, or without a weight, adds none."""
    has_row = (row_of_pair >= 0) & (row_of_pair < len(rows))
    taken = rows.index_select(0, row_of_pair.masked_fill(~has_row, 0)).float()
    if scales is not None:
        taken = taken * scales.reshape(-1, 1).float()
        has_row = has_row & (scales.reshape(-1) != 0)
    taken = taken.masked_fill(~has_row[:, None], 0)
    top_k = 1 if scales is None else scales.shape[1]
    return taken.view(-1, top_k, rows.shape[-1]).sum(1).to(rows.dtype)


def top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    return apply_top_k_top_p_pytorch(logits.clone(), k, p)


FORMS: Mapping[str, Callable[..., Any]] = {
    "npu::_npu_moe_token_unpermute": token_unpermute,
    "npu::npu_add_rms_norm": add_rms_norm,
    "npu::npu_add_rms_norm_cast": add_rms_norm_cast,
    "npu::npu_add_rms_norm_dynamic_quant": add_rms_norm_dynamic_quant,
    "npu::npu_add_rms_norm_quant": add_rms_norm_quant,
    "npu::npu_dequant_swiglu_quant": dequant_swiglu_quant,
    "npu::npu_dynamic_quant": dynamic_quant,
    "npu::npu_geglu": geglu,
    "npu::npu_gelu": one_gelu,
    "npu::npu_gemma_rms_norm": gemma_rms_norm,
    "npu::npu_grouped_matmul": grouped_matmul,
    "npu::npu_moe_finalize_routing": finalize_routing,
    "npu::npu_moe_gating_top_k": gating_top_k,
    "npu::npu_moe_gating_top_k_softmax_v2": gating_top_k_softmax,
    "npu::npu_mrope": mrope,
    "npu::npu_quant_matmul": quant_matmul,
    "npu::npu_quantize": quantize,
    "npu::npu_rms_norm": rms_norm,
    "npu::npu_rotary_mul": rotary_mul,
    "npu::npu_swiglu": swiglu,
    "npu::npu_top_k_top_p": top_k_top_p,
    "npu::npu_transpose_batchmatmul": transpose_batchmatmul,
}
"""By operators, as a `Call` names them: their forms."""


def form_of(call: Call) -> Callable[..., Any] | None:
    """Return a function that takes what the operator takes, and makes a call by torch's form.

    It is None if the operator has no form, or none with an argument that isn't its default here.
    """
    if (form := FORMS.get(call.operator)) is None:
        return None
    taken = inspect.signature(form).parameters.keys()
    if any(name not in taken for name, value in call.arguments.items() if value != []):
        return None
    names = [argument.name for argument in call.function()._schema.arguments]

    def make(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args)), **kwargs}
        return form(**{name: value for name, value in given.items() if name in taken})

    return make
