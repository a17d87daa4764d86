"""Constraints of the fused attention operators: caches, sparse modes, masks, and open readings.

``v1`` and ``v2`` are the docstrings of the two versions.
"""

from functools import partial

from ascend_emulator.operators.constraint import Constraint, Enforced

NAME = "fused attention"
record = partial(Constraint, NAME)
AGREED, DOCSTRING = Enforced.AGREED, Enforced.DOCSTRING
PRACTICE, SCHEMA, READING = Enforced.PRACTICE, Enforced.SCHEMA, Enforced.READING
ASCEND = "vllm-project/vllm-ascend"
SAME = "the same"
UNKNOWN = "not known"
KERNEL = "published kernel sources of prompt_flash_attention (`ComputeOffsetForCausal`)"

# In each record: argument, name, demand, docstring_says, practice, source, enforced, why.

_PAGED = [
    record(
        "block_table",
        "block table",
        "int32 of rank 2",
        "int32, two dimensions (v1, v2)",
        SAME,
        "none needed",
        AGREED,
    ),
    record(
        "block_table",
        "block table contiguous",
        "a contiguous table",
        "not stated for this argument",
        "padded tables are passed as whole rows",
        "none found",
        READING,
        "ND tensors without strides; a column slice would be read at the wrong stride",
    ),
    record(
        "block_table",
        "block table rows",
        "one row for each request",
        "the first dimension equals B (v1, v2)",
        SAME,
        "none needed",
        AGREED,
    ),
    record(
        "actual_seq_lengths_kv",
        "kv lengths required",
        "kv lengths with a block table",
        "must be passed (v1, v2)",
        SAME,
        "none needed",
        AGREED,
    ),
    record(
        "actual_seq_lengths_kv",
        "kv lengths in table",
        "with a block table the length of each request, not cumulative, within its table row",
        "the length of each batch with page attention; the table as wide as needed (v1, v2)",
        SAME,
        f"{ASCEND} passes seq_lens as they are",
        AGREED,
    ),
    record(
        "block_table",
        "block ids",
        "ids of existing blocks wherever a length reaches",
        "not checked, the user has to make sure (v1, v2)",
        "a wrong id reads foreign memory",
        "none needed",
        READING,
        "the emulator refuses what a kernel would read out of bounds",
    ),
    record(
        "key, value",
        "cache form",
        "(num_blocks, block_size, Nkv * D), or (num_blocks, Nkv, block_size, D) with BNSD and TND",
        "these two forms; BSH and BSND take the first alone; the second is faster (v1, v2)",
        "the first",
        f"{ASCEND}: caches viewed as (num_block, block_size, -1)",
        AGREED,
        "NZ caches of rank 5 are refused: this reference has no NZ",
    ),
    record(
        "key, value",
        "cache row width",
        "Nkv * D of at most 65535 in the form of rank 3",
        "more is intercepted, use the form of rank 4 (v1, v2)",
        UNKNOWN,
        "none found",
        DOCSTRING,
    ),
    record(
        "key, value",
        "cache elements",
        "at most 2147483647 elements in each cache",
        "the product of all dimensions fits int32 (v1, v2, for one query token)",
        UNKNOWN,
        "none found",
        DOCSTRING,
    ),
    record(
        "block_size",
        "block size",
        "a multiple of 16, above 0, at most 1024",
        "for one query token a multiple of 16 up to 512, for several one of 128 from 128 to 512 "
        "(v1, v2)",
        "the kernels differ, see their sections; 128 is taken by all",
        f"{ASCEND}; published tiling sources",
        Enforced.SOURCES,
    ),
]

_SPARSE = [
    record(
        "sparse_mode",
        "sparse_mode",
        "0, 1, 2, 3 or 4",
        "0 to 4; 9 for latent attention alone, 5 to 8 not implemented (v1, v2)",
        SAME,
        "none needed",
        AGREED,
    ),
    record(
        "sparse_mode",
        "sparse modes of TND",
        "with TND mode 0 without a mask, 3 or 4 with one",
        "mode 0 without mask, mode 3 with mask, mode 4 with mask (v1, v2)",
        "FAI and PFA check it; V3 of CANN 9.1 also takes modes 1 and 2, and masks in mode 0",
        f"{ASCEND} 8508 for mode 4; ops-transformer, `CheckFAIMask`, `CheckPASparseMode`",
        DOCSTRING,
    ),
    record(
        "sparse_mode",
        "sparse modes of one token",
        "mode 0 or 1 for one query token in BSH, BSND, BNSD",
        "without effect when Q_S is 1 (v1, v2)",
        "mode 4 is relied on for windows in BSND",
        "sgl-project/sglang 24582",
        READING,
        "the two contradict each other, so nothing may depend on either before it was tried",
    ),
    record(
        "pre_tokens, next_tokens",
        "band is not empty",
        "pre_tokens + next_tokens >= 0 in mode 4",
        "preTokens + nextTokens >= 0 (v1, v2)",
        SAME,
        "none needed",
        AGREED,
    ),
    record(
        "pre_tokens, next_tokens",
        "band reaches the keys",
        "pre_tokens >= -query length and next_tokens >= -kv length in mode 4",
        "preTokens >= -actual_seq_qlen, nextTokens >= -actual_seq_kvlen (v1, v2)",
        SAME,
        "none needed",
        AGREED,
    ),
]

_MASK = [
    record(
        "atten_mask",
        "mask required",
        "a mask in every sparse mode but 0",
        "modes 1 to 4 fail without one (v1, v2)",
        SAME,
        "none needed",
        AGREED,
    ),
    record(
        "atten_mask",
        "mask dtype",
        "bool, int8 or uint8",
        "bool, int8, uint8 (v1, v2)",
        "another dtype hangs",
        f"{ASCEND} 4410",
        AGREED,
    ),
    record(
        "atten_mask",
        "mask contiguous",
        "a contiguous mask",
        "not contiguous is not supported (v1, v2)",
        SAME,
        "none needed",
        AGREED,
    ),
    record(
        "atten_mask",
        "compressed mask shape",
        "(2048, 2048), (1, 2048, 2048) or (1, 1, 2048, 2048) in modes 2, 3 and 4",
        "these shapes, else an error (v1, v2)",
        SAME,
        "none needed",
        AGREED,
    ),
    record(
        "atten_mask",
        "full mask shape",
        "in modes 0 and 1 (1, Q_S, KV_S), (B, 1, Q_S, KV_S), (1, 1, Q_S, KV_S); "
        "(B, KV_S) for one query token, (Q_S, KV_S) for several; sizes exact or rounded up to "
        "16 or 32; with a block table at least its columns * block_size wide",
        "these shapes (v1, v2)",
        "masks of too low a rank were silently ignored",
        f"{ASCEND} 15503",
        DOCSTRING,
    ),
]

_READINGS = [
    record(
        "pre_tokens",
        "window",
        "a window of W tokens as pre_tokens = W - 1, next_tokens = 0",
        "how many tokens before are attended to; rows take no part when pre_tokens < 0 in mode 4, "
        "so pre_tokens = 0 still sees the token itself: both limits are inclusive (v1, v2)",
        "W and W - 1 are both in use",
        f"{ASCEND} 8508 merged W, 8210 discusses both; {KERNEL} shifts by preTokens + 1",
        DOCSTRING,
        "token p sees p-window+1..p, and p - pre_tokens is the first it sees; W would see one more",
        refused=False,
    ),
    record(
        "pre_tokens",
        "window of one token",
        "mode 4 narrows requests of one query token in TND",
        "pre_tokens, next_tokens and sparse_mode have no effect when Q_S is 1 (v1, v2)",
        "windows are passed for decodes in TND",
        f"{ASCEND} 8508",
        PRACTICE,
        "Q_S is no dimension of TND",
        refused=False,
    ),
    record(
        "block_table",
        "blocks outside of a band",
        "existing blocks of finite numbers where a length reaches, seen or not",
        "not stated",
        "tiles wholly outside of the band are skipped, the rest of a tile is read and masked",
        "published kernel sources of prompt_flash_attention (`sInnerFirstToken`)",
        READING,
        "all of it is read and masked here: freed blocks and the null block hold finite numbers",
        refused=False,
    ),
    record(
        "atten_mask",
        "mask content",
        "1 above the diagonal of the constant: masked",
        "'the user has to make sure that it is a lower triangle' (v1, v2), which is what stays "
        "visible",
        "torch.triu(torch.ones(2048, 2048), 1)",
        f"{ASCEND}; {KERNEL}",
        PRACTICE,
        "a tile reads the window of the constant that lies as far from the diagonal as itself; "
        "the lower limit of a band reads it inverted",
        refused=False,
    ),
    record(
        "pre_tokens, next_tokens",
        "band of a full mask",
        "in mode 0 with a mask the band counts from the upper left corner",
        "rows take no part when qlen - kvlen - pre_tokens > 0 or next_tokens < 0 (v1, v2)",
        UNKNOWN,
        "none found",
        DOCSTRING,
        refused=False,
    ),
    record(
        "block_table",
        "TND with a block table",
        "TND accepted with a block table",
        "TND without page attention on A2 and A3 (v1, v2), described with it elsewhere in them",
        "used in every paged state",
        f"{ASCEND}",
        PRACTICE,
        refused=False,
    ),
    record(
        "block_table",
        "shared blocks",
        "requests may share blocks",
        "num_blocks not below the sum of all requests' blocks (v1, v2)",
        "prefix caching shares blocks; PFA and the profile docs compare the sum with the cache",
        f"vllm-project/vllm, {ASCEND}",
        PRACTICE,
        refused=False,
    ),
    record(
        "actual_seq_lengths_kv",
        "request without keys",
        "zero output for a request without keys",
        "an empty key or value fills the output with zeros (v1, v2)",
        "padding requests of full graphs have length 0; FAI's decode kernel leaves them unwritten",
        f"{ASCEND} 4518",
        AGREED,
        refused=False,
    ),
    record(
        "softmax_lse_flag",
        "softmax_lse not asked for",
        "an empty softmax_lse, shape (0,)",
        "shape [1], value 0 (v1, v2)",
        "shape (0,)",
        "torch_npu's Meta function",
        PRACTICE,
        refused=False,
    ),
    record(
        "softmax_lse_flag",
        "softmax_lse of empty rows",
        "+inf in rows that see nothing",
        "not stated",
        "initialised to +inf",
        "published kernel sources: 3e+99, 'invalid batch'",
        PRACTICE,
        refused=False,
    ),
    record(
        "inner_precise",
        "fully masked rows",
        "NaN in rows that see nothing, zero with the correction of bit 1",
        "accuracy may suffer without the correction (v1, v2)",
        UNKNOWN,
        "none found",
        READING,
        "NaN, so that nothing comes to depend on it",
        refused=False,
    ),
    record(
        "actual_seq_lengths",
        "query rows past a length",
        "zero output past a request's length",
        "not stated",
        UNKNOWN,
        "none found",
        READING,
        refused=False,
    ),
]

KV_AND_MASK = [*_PAGED, *_SPARSE, *_MASK, *_READINGS]
