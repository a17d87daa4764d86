"""What fused attention demands of calls with ``query_rope`` and ``key_rope`` (latent attention).

Two forms exist. *Absorbed*: a head size of 512 over latent rows, which are keys and values of one
K/V head. *Projected*: a head size of 128 over K and V of every head. Both reach kernel V3.
"""

from functools import partial

import torch

from ascend_emulator import profiles
from ascend_emulator.operators.constraint import Constraint, Enforced, Family, shape_of
from ascend_emulator.operators.fused_arguments import LATENT_HEAD_SIZE, FusedAttention

NAME = "fused attention, rope"
record = partial(Constraint, NAME)
AGREED, SOURCES, DOCSTRING = Enforced.AGREED, Enforced.SOURCES, Enforced.DOCSTRING
ROPE_91 = "branch 9.1.0 FIA/checkers/rope_checker.cpp"
COMMON_91 = "branch 9.1.0 FIA/checkers/common_checker.cpp"
V3_85 = "v8.5.0 FIA/arch32/fused_infer_attention_score_tiling_check_feature.cpp"
PLUGIN = "Ascend/op-plugin's documentation of npu_fused_infer_attention_score_v2"
NUM_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
ROPE_SIZE = 64
PROJECTED_HEAD_SIZE = 128
IN_DOCS = "profile docs"

# In each record: argument, name, demand, docstring_says, practice, source, enforced, why.
ROPE_RULES = Family(
    NAME,
    [
        record(
            "query_rope, key_rope",
            "both ropes",
            "both or none",
            "given together or not at all (v1, v2)",
            "the same",
            f"{ROPE_91}, `CheckRopeConsistency`",
            AGREED,
        ),
        record(
            "query, key, value",
            "head size with rope",
            "a head size of 512 or 128, the same for query, key and value",
            "D of 512 or 128 (v1, v2)",
            "the same",
            f"{ROPE_91}, `CheckQDsizeSupport`; {V3_85}, `CheckFeatureHeadDim`",
            AGREED,
        ),
        record(
            "query_rope, key_rope",
            "size of rope",
            "a D of 64, and the other dimensions of query and of key",
            "D of 64, everything else as query and key (v1, v2)",
            "the same",
            f"{ROPE_91}, `CheckRopeDSizeSupport`, `CheckQKAndQKRopeShapeConsistency`, "
            "`CheckPAKeyAndKeyRopeShapeConsistency`",
            AGREED,
        ),
        record(
            "query_rope, key_rope",
            "dtype of rope",
            "the dtype of query and key",
            "as query and key (v1, v2)",
            "the same",
            f"{ROPE_91}, `CheckRopeDtypeConsistency`",
            AGREED,
        ),
        record(
            "query_rope, key_rope",
            "contiguous rope",
            "a contiguous tensor",
            "not contiguous is not supported (v1, v2)",
            "the same",
            f"{ROPE_91}, `CheckKRopeContiguous`",
            AGREED,
        ),
        record(
            "num_heads",
            "heads over latent rows",
            "1, 2, 4, 8, 16, 32, 64 or 128 heads for a head size of 512",
            "1, 2, 4, 8, 16, 32, 64 or 128 (v1, v2)",
            "the same",
            f"{COMMON_91}, `CheckHeadNum`; {V3_85}, `CheckFeatureMlaNoQuantShape`",
            AGREED,
        ),
        record(
            "num_key_value_heads",
            "one head of latent rows",
            "1 for a head size of 512",
            "key and value with N of 1 (v1, v2)",
            "the same; 0 would mean as many as query heads",
            f"{COMMON_91}, `CheckHeadNum`",
            AGREED,
        ),
        record(
            "input_layout",
            "layout with rope",
            "TND, and for a head size of 512 also TND_NTD",
            "these and layouts with a batch axis (v1, v2)",
            "TND and TND_NTD in vllm-ascend",
            f"{COMMON_91}, `CheckInputLayout`",
            Enforced.READING,
            "layouts with a batch axis are outside of this reference",
        ),
        record(
            "block_size",
            "block size with rope",
            "a multiple of 16, at most 1024",
            "128, or 16 and 128 (v1, v2)",
            "up to 1024 on 9.1, where the head size alone decides on 8.5",
            "branch 9.1.0 FIA/checkers/paged_attention_checker.cpp, `CheckBlockSizeNonQuant910B`; "
            f"{PLUGIN}",
            SOURCES,
        ),
        record(
            "query",
            "query tokens over latent rows",
            "1 to 16 query tokens of each request for a head size of 512",
            "Q_S of 1 to 16 (v1, v2)",
            "V3 takes more",
            f"{PLUGIN}: Q_S up to 16",
            DOCSTRING,
            "no code of 8.5 or 9.1 checks it",
            where=IN_DOCS,
        ),
        record(
            "block_size",
            "documented block size with rope",
            "16 or 128",
            "block_size 16 or 128 (v1, v2)",
            "vllm-ascend uses 128",
            "the docstring of the wheel",
            DOCSTRING,
            where=IN_DOCS,
        ),
        record(
            "query",
            "bfloat16 of projected keys",
            "bfloat16 for a head size of 128 with rope",
            "with TND bfloat16 alone (v1, v2)",
            "V3 takes float16, too",
            "the docstring of the wheel",
            DOCSTRING,
            where=IN_DOCS,
        ),
        record(
            "block_table",
            "no cache of projected keys",
            "fresh K and V for a head size of 128 with rope",
            "no page attention with TND and D other than 512 (v1, v2)",
            "V3 takes a cache, too",
            "the docstring of the wheel",
            DOCSTRING,
            where=IN_DOCS,
        ),
        record(
            "key, value",
            "latent rows twice",
            "latent rows as key and as value: scores are of latent row and rotated key together, "
            "values are the latent rows",
            "the absorbed form of MLA (v1, v2)",
            "the same tensor is passed as key and value",
            "vllm-project/vllm-ascend, attention/mla_v1.py",
            AGREED,
            refused=False,
        ),
    ],
)


def check_rope(fused: FusedAttention) -> None:
    """Refuse what the kernel refuses of calls with rope, in every release."""
    demand = ROPE_RULES.call(fused.call.operator, fused.call.renamed).demand
    query_rope, key_rope = fused.query_rope, fused.key_rope
    if not fused.has_rope:
        demand("layout with rope", fused.input_layout != "TND_NTD", "TND_NTD without rope")
        return
    given = ["none" if rope is None else shape_of(rope) for rope in (query_rope, key_rope)]
    demand("both ropes", query_rope is not None and key_rope is not None, given)
    assert query_rope is not None and key_rope is not None
    size = fused.head_size
    layouts = ("TND", "TND_NTD") if size == LATENT_HEAD_SIZE else ("TND",)
    demand("layout with rope", fused.input_layout in layouts, repr(fused.input_layout))
    demand("head size with rope", size in (LATENT_HEAD_SIZE, PROJECTED_HEAD_SIZE), size)
    for argument, rope, whole in (
        ("query_rope", query_rope, fused.query),
        ("key_rope", key_rope, fused.key),
    ):
        width = ROPE_SIZE
        if argument == "key_rope" and whole.dim() == 3 and fused.is_paged:
            width *= fused.kv_heads
        wanted = (*shape_of(whole)[:-1], width)
        demand(
            "size of rope", shape_of(rope) == wanted, f"{shape_of(rope)}, not {wanted}", argument
        )
        demand("dtype of rope", rope.dtype == whole.dtype, rope.dtype, argument)
        demand("contiguous rope", rope.is_contiguous(), f"strides {rope.stride()}", argument)
    if size == LATENT_HEAD_SIZE:
        demand("heads over latent rows", fused.num_heads in NUM_HEADS, fused.num_heads)
        given_heads = fused.num_key_value_heads
        demand("one head of latent rows", given_heads == 1, given_heads)
    if fused.is_paged:
        block = fused.block_size
        demand("block size with rope", block % 16 == 0 and 0 < block <= 1024, block)


def check_documented_rope(fused: FusedAttention) -> None:
    """Refuse what only the documentation refuses of calls with rope."""
    if not fused.has_rope or not profiles.current().documentation:
        return
    demand = ROPE_RULES.call(fused.call.operator, fused.call.renamed).demand
    if fused.is_absorbed:
        demand("query tokens over latent rows", fused.query_width <= 16, fused.query_width)
    else:
        is_bfloat16 = fused.query.dtype == torch.bfloat16
        demand("bfloat16 of projected keys", is_bfloat16, fused.query.dtype)
        demand("no cache of projected keys", not fused.is_paged, "a block table")
    if fused.is_paged:
        demand("documented block size with rope", fused.block_size in (16, 128), fused.block_size)
