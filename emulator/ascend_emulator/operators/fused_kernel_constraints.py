"""Constraints of the kernels behind fused attention, each with the release that it was read in.

Sources are CANN's published ops-transformer, as tag or branch, file and function. ``FIA``, ``PFA``
and ``IFA`` stand for the folder ``op_host`` of ``attention/fused_infer_attention_score``,
``attention/prompt_flash_attention`` and ``attention/incre_flash_attention``. What every kernel
demands stands in ``fused_constraints.py``.
"""

from ascend_emulator.operators.constraint import Constraint, Enforced, Family

SOURCES, DOCSTRING, READING = Enforced.SOURCES, Enforced.DOCSTRING, Enforced.READING
ROUTE_85 = "v8.5.0 FIA/arch32/fused_infer_attention_score_tiling_v3.cpp"
ROUTE_91 = "branch 9.1.0 FIA/arch22/fused_infer_attention_score_tiling_v3.cpp"
FAI_85 = "v8.5.0 FIA/fused_infer_attention_score_tiling.cpp"
FAI_91 = "branch 9.1.0 FIA/fused_infer_attention_score_tiling.cpp"
V3_85 = "v8.5.0 FIA/arch32/fused_infer_attention_score_tiling_check_feature.cpp"
V3_91 = "branch 9.1.0 FIA/checkers"
PFA_85 = "v8.5.0 PFA/prompt_flash_attention_tiling.cpp"
IFA_85 = "v8.5.0 IFA/incre_flash_attention_tiling.cpp"
CANN_DOCS = (
    "branch 9.1.0 attention/fused_infer_attention_score/docs/aclnnFusedInferAttentionScoreV3.md"
)
OP_PLUGIN = "Ascend/op-plugin's documentation of npu_fused_infer_attention_score"
UNSAID = "not stated"
ON_85, ON_91, ON_BOTH, IN_DOCS = "CANN 8.5", "CANN 9.1", "CANN 8.5 and 9.1", "profile docs"


def record(
    kernel: str,
    argument: str,
    name: str,
    demand: str,
    where: str,
    docstring_says: str,
    practice: str,
    source: str,
    enforced: Enforced = SOURCES,
    why: str = "",
    refused: bool = True,
) -> Constraint:
    return Constraint(
        family_name(kernel),
        argument,
        name,
        demand,
        docstring_says,
        practice,
        source,
        enforced,
        why,
        refused,
        where,
    )


def family_name(kernel: str) -> str:
    return f"fused attention, {kernel}"


ROUTE = Family(
    family_name("route"),
    [
        record(
            "route",
            "num_key_value_heads",
            "zero heads of a paged cache",
            "num_key_value_heads above 0 in TND with a cache of rank 3",
            ON_91,
            "0 means num_heads (v1, v2)",
            "the route divides the width of the cache by it",
            f"{ROUTE_91}, `CheckSpecCondPA3Dim`",
            why="an integer division by zero ends the process",
        ),
    ],
)
"""What the choice of a kernel demands by itself."""

FAI = Family(
    family_name("FAI"),
    [
        record(
            "FAI",
            "actual_seq_lengths_kv",
            "rows without keys in the decode kernel",
            "output rows that are not written where a request has no keys: paged, mode 0, one "
            "query token each, at least as many requests as cube cores, blocks of 128, no "
            "softmax_lse, inner_precise 0, at most 128 query heads for a K/V head",
            ON_91,
            "an empty key or value fills the output with zeros (v1, v2)",
            "the loop over keys runs zero times, and nothing initialises the rows; the regular "
            "kernel writes zeros and +inf",
            "branch 9.1.0 attention/fused_infer_attention_score/op_kernel/"
            f"flash_attention_regular_decode.h; {FAI_91}, `ComputeSeqLenAndDecodeFlagsForFAI`",
            why="NaN here, so that nothing comes to depend on it",
            refused=False,
        ),
    ],
)
"""What is special to the kernel for TND (``TilingProcess4SplitFuse``): it refuses nothing beyond
what every kernel is documented to refuse, and checks less than that."""

V3 = Family(
    family_name("V3"),
    [
        record(
            "V3",
            "query",
            "head size of V3",
            "in TND a head size of 64 or 128 (8.5), 64, 128 or 192 (9.1)",
            ON_BOTH,
            "with TND 192 (v1), 128 or 192 (v2)",
            "D = 192 goes elsewhere on 8.5",
            f"{V3_85}, `CheckFeatureHeadDim`; {V3_91}/common_checker.cpp, "
            "`ValidateNoRopeLayoutDim`",
        ),
        record(
            "V3",
            "block_size",
            "block size of V3",
            "a multiple of 16 of at most 1024; for head sizes other than 64 and 128 a multiple of "
            "128 of at most 1024 with several query tokens, of 16 and at most 512 with one",
            ON_BOTH,
            "128 to 512 in multiples of 128 for several query tokens (v1, v2)",
            "up to 1024",
            f"{V3_85}, `CheckFeatureNoquantBlockSize`; {V3_91}/paged_attention_checker.cpp, "
            "`CheckBlockSizeNonQuant910B`",
        ),
    ],
)
"""Constraints of the unified kernel (``TilingFusedInferAttentionScoreV3``)."""

PFA = Family(
    family_name("PFA"),
    [
        record(
            "PFA",
            "query, key, value",
            "dtype of PFA",
            "bfloat16 in TND",
            ON_85,
            "with TND bfloat16 alone (v1, v2)",
            "the same",
            f"{PFA_85}, `CheckInputShapeWhenLayoutIsTND`",
        ),
        record(
            "PFA",
            "query",
            "head size of PFA",
            "a head size of 64, 128 or 192 in TND",
            ON_85,
            "with TND 192 (v1), 128 or 192 (v2)",
            "the same; 64 and 128 go to V3",
            f"{PFA_85}, `CheckInputShapeWhenLayoutIsTND`; vllm-project/vllm-ascend 9632, 7729",
        ),
        record(
            "PFA",
            "num_key_value_heads",
            "grouped heads of 192",
            "as many K/V heads as query heads for a head size of 192 in TND",
            ON_85,
            UNSAID,
            "the same",
            f"{PFA_85}, `CheckInputShapeWhenLayoutIsTND`",
        ),
        record(
            "PFA",
            "sparse_mode",
            "window of 192",
            "mode 4 with a head size of 64 or 128 alone in TND",
            ON_85,
            UNSAID,
            "the same",
            f"{PFA_85}, the TND branch of `RunBigKernelTilingWithParams`",
        ),
        record(
            "PFA",
            "block_size",
            "block size of PFA",
            "a multiple of 128, at most 1024",
            ON_85,
            "128 to 512 in multiples of 128 for several query tokens (v1, v2)",
            "also for one query token",
            f"{PFA_85}, `checkPABlockSizeAndBlockTable`",
        ),
        record(
            "PFA",
            "actual_seq_lengths_kv",
            "some keys",
            "a paged call in which at least one request has keys",
            ON_85,
            UNSAID,
            "the number of blocks in use must not be 0",
            f"{PFA_85}, `CheckPAWhenBaseApi`",
        ),
        record(
            "PFA",
            "block_table",
            "sum of blocks in PFA",
            "no more blocks over all requests, shared ones counted for each, than the cache has",
            ON_85,
            "num_blocks not below the sum of all requests' blocks (v1, v2)",
            "the same, so prefix caching and the lengths of a capture meet it",
            f"{PFA_85}, `CheckPAWhenBaseApi`; vllm-project/vllm-ascend 5425",
        ),
        record(
            "PFA",
            "actual_seq_lengths",
            "lengths in PFA",
            "at most 4096 lengths in TND",
            ON_85,
            "with TND at most 4096 lengths (v2)",
            "the same for both versions",
            f"{PFA_85}, `MAX_VAR_LEN_SEQ_LEN`",
        ),
    ],
)
"""Constraints of the older prompt kernel (``TilingProcess4PFA``)."""

IFA = Family(
    family_name("IFA"),
    [
        record(
            "IFA",
            "query",
            "head size 512 without rope",
            "query_rope and key_rope for a head size of 512 in TND",
            ON_85,
            "D of 512 for latent attention (v1, v2)",
            "on 9.1 the call goes to V3, which refuses it, too",
            f"{IFA_85}, `QKVPreProcess4TND`",
        ),
        record(
            "IFA",
            "block_size",
            "block size of IFA",
            "a multiple of 16, at most 512",
            ON_BOTH,
            "a multiple of 16 up to 512 for one query token (v1)",
            "the same",
            f"{OP_PLUGIN}",
            DOCSTRING,
        ),
    ],
)
"""Constraints of the older kernel for one query token (``TilingProcess4IFA``)."""

DOCUMENTATION = Family(
    family_name("documentation"),
    [
        record(
            "documentation",
            "block_table",
            "sum of blocks",
            "no more blocks over all requests, shared ones counted for each, than the cache has",
            IN_DOCS,
            "num_blocks not below the sum of all requests' blocks (v1, v2)",
            "no code of 9.1 checks it",
            f"{CANN_DOCS}; {OP_PLUGIN}",
            DOCSTRING,
        ),
        record(
            "documentation",
            "actual_seq_lengths",
            "number of lengths",
            "at most 4096 lengths in TND",
            IN_DOCS,
            "with TND at most 4096 lengths (v2)",
            "no code of 9.1 checks it",
            f"{CANN_DOCS}; {OP_PLUGIN}",
            DOCSTRING,
        ),
        record(
            "documentation",
            "actual_seq_lengths_kv",
            "keys for every query of mode 3",
            "in TND with mode 3 as many keys as query tokens in every request, padding included",
            IN_DOCS,
            "refused where kv length - query length < 0 (v1, v2)",
            "no code of 9.1 checks it",
            f"{CANN_DOCS}",
            DOCSTRING,
            "the page of CANN even wants more keys than query tokens, which would forbid prompts",
        ),
        record(
            "documentation",
            "block_size",
            "block size of TND",
            "in TND a multiple of 16 of at most 128, and 128 when a request has several query "
            "tokens",
            IN_DOCS,
            "128 to 512 in multiples of 128 for several query tokens (v1, v2)",
            "FAI takes up to 512 and V3 up to 1024 on 9.1",
            f"{CANN_DOCS} ('blockSize <= 128, 16 aligned'); {OP_PLUGIN}",
            DOCSTRING,
            "the page of CANN 8.5 says 128 alone; what satisfies every page is enforced",
        ),
        record(
            "documentation",
            "inner_precise",
            "inner_precise of TND",
            "in TND inner_precise 0, or also 1 for float16 with as many K/V heads as query heads",
            IN_DOCS,
            "0 to 3 (v1, v2)",
            "other values go to V3 on 9.1, which takes them",
            f"{CANN_DOCS}",
            DOCSTRING,
        ),
    ],
)
"""What the documentation demands beyond the code, in the profile ``docs``."""

KERNELS = {"FAI": FAI, "V3": V3, "PFA": PFA, "IFA": IFA}
KERNEL_FAMILIES = (ROUTE, *KERNELS.values(), DOCUMENTATION)
