"""Rows of fused operators that replace torch's own. Start-up makes the same calls."""

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from vllm_npu_prep.ops.fused import OPERATORS
from vllm_npu_prep.verify.fused import probes
from vllm_npu_prep.verify.outcome import Outcome, worst_of
from vllm_npu_prep.verify.row import DTYPES, Record, Row, RowContext, compare

COVERS: Mapping[str, tuple[Record, ...]] = {
    "rms_norm": (("norms", "gamma shape"),),
    "add_rms_norm": (("norms", "equal shapes"), ("norms", "rounding of the sum")),
    "add_rms_norm_cast": (("norms", "16 bits"), ("norms", "float32 of the result")),
    "gemma_rms_norm": (("norms", "one is added to gamma"),),
    "rotary": (
        ("npu_mrope", "dense rows"),
        ("npu_mrope", "rows with gaps"),
        ("npu_mrope", "head size"),
        ("npu_mrope", "same dtype"),
        ("npu_mrope", "token count"),
    ),
    "mrope": (("npu_mrope", "mrope_section"), ("npu_mrope", "positions shape")),
    "vision_rotary": (("npu_rotary_mul", "same dtype"), ("npu_rotary_mul", "range of r1 and r2")),
    "qkv": (("npu_grouped_matmul", "not grouped"), ("npu_grouped_matmul", "shapes")),
    "geglu": (("gelu", "activated half"),),
    "latent": tuple(
        ("npu_transpose_batchmatmul", name) for name in ("dtype", "shapes", "permutations", "sizes")
    ),
    "int8_norm": (
        ("norms to int8", "form"),
        ("norms to int8", "rounding before int8"),
    ),
    "int8_swiglu": (
        ("npu_dequant_swiglu_quant", "mode"),
        ("npu_dequant_swiglu_quant", "direction"),
        ("npu_dequant_swiglu_quant", "activated half"),
    ),
    "experts": (
        ("npu_moe_init_routing_v2", "active_num"),
        ("npu_moe_init_routing_v2", "inactive pairs"),
        ("npu_moe_init_routing_v2", "inactive rows"),
        ("npu_moe_init_routing_v2", "order"),
        ("npu_grouped_matmul, rows", "group sizes"),
        ("npu_grouped_matmul, rows", "one tensor each"),
        ("npu_grouped_matmul, rows", "plain"),
        ("npu_grouped_matmul, rows", "rows of no group"),
        ("npu_moe_token_unpermute", "index past the rows"),
    ),
    "finalize_routing": tuple(
        ("npu_moe_finalize_routing", name)
        for name in ("pairs without a row", "precision of sums", "unsupported mode")
    ),
    "gating": (
        ("npu_moe_gating_top_k", "bias chooses"),
        ("npu_moe_gating_top_k", "division by the sum"),
    ),
    "gating_softmax": (
        ("npu_moe_gating_top_k_softmax_v2", "finished rows"),
        ("npu_moe_gating_top_k_softmax_v2", "order of softmax"),
    ),
    "top_k_top_p": (
        ("npu_top_k_top_p", "dtype"),
        ("npu_top_k_top_p", "k range"),
        ("npu_top_k_top_p", "limit dtype"),
        ("npu_top_k_top_p", "limit shape"),
        ("npu_top_k_top_p", "limits"),
        ("npu_top_k_top_p", "order of sums"),
        ("npu_top_k_top_p", "p range"),
        ("npu_top_k_top_p", "rank"),
        ("npu_top_k_top_p", "ties at k"),
    ),
}
"""The records that each switch's call tries."""


def fused(name: str, dtype: torch.dtype, context: RowContext) -> Outcome:
    probe = probes(dtype)[name]
    given = f"{OPERATORS[name]}, {dtype}"
    results = zip(probe.call(context.put), probe.expected(), strict=True)
    where = ("row",)
    return worst_of([compare(got, formula, given, where=where) for got, formula in results], given)


def _rows() -> Iterator[Row]:
    for switch, operator in OPERATORS.items():
        for short, dtype in DTYPES.items():
            yield Row(
                f"fused-{switch.replace('_', '-')}-{short}",
                operator,
                partial(fused, switch, dtype),
                COVERS.get(switch, ()),
            )


ROWS: tuple[Row, ...] = tuple(_rows())
