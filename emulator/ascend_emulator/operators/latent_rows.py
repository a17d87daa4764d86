"""References of the operators that prefills of latent attention need beside fused attention.

``npu_gather_pa_kv_cache`` gathers rows of a paged cache, ``npu_attention_update`` merges attention
over several sets of rows.
"""

from functools import partial

import torch

from ascend_emulator.api import touch
from ascend_emulator.operators.constraint import Constraint, Enforced, Family, shape_of

GATHER = "npu::npu_gather_pa_kv_cache"
UPDATE = "npu::npu_attention_update"
NO_DOCSTRING = "no docstring"
SOURCES, PRACTICE = Enforced.SOURCES, Enforced.PRACTICE
GATHER_DOCS = "cann/ops-transformer, branch 9.1.0, attention/gather_pa_kv_cache/docs"
UPDATE_DOCS = "Ascend/op-plugin's documentation of npu_attention_update"
MOST_PARTS = 16
GATHER_NAME, UPDATE_NAME = "npu_gather_pa_kv_cache", "npu_attention_update"
gather_record = partial(Constraint, GATHER_NAME)
update_record = partial(Constraint, UPDATE_NAME)

# In each record: argument, name, demand, docstring_says, practice, source, enforced, why.
GATHER_RULES = Family(
    GATHER_NAME,
    [
        gather_record(
            "key_cache, value_cache",
            "cache form",
            "[num_blocks, block_size, num_heads, head_size] with the same blocks in both",
            NO_DOCSTRING,
            "head sizes of key and value may differ",
            GATHER_DOCS,
            PRACTICE,
            "this reference has no NZ caches",
        ),
        gather_record(
            "key, value",
            "result form",
            "[rows, num_heads, head_size] with the heads and dtype of the cache",
            NO_DOCSTRING,
            "the same",
            GATHER_DOCS,
            PRACTICE,
        ),
        gather_record(
            "key, value",
            "rows",
            "as many rows as all lengths together",
            NO_DOCSTRING,
            "the same",
            GATHER_DOCS,
            PRACTICE,
        ),
        gather_record(
            "block_tables, seq_lens, seq_offset",
            "integers",
            "int32 or int64, all three alike: a table of rank 2, a length and an offset for each "
            "of its rows",
            NO_DOCSTRING,
            "the same",
            GATHER_DOCS,
            PRACTICE,
        ),
        gather_record(
            "seq_offset",
            "offset",
            "offsets that are multiples of block_size",
            NO_DOCSTRING,
            "a remainder is dropped: rows from the block's start on",
            "Ascend/op-plugin, its test of npu_gather_pa_kv_cache: seq_offset // block_size",
            PRACTICE,
            "silently reading other rows than asked for would be worse than refusing",
        ),
        gather_record(
            "block_tables",
            "block ids",
            "ids of existing blocks, and columns for every row that is read",
            NO_DOCSTRING,
            "rows of other ids are zero",
            "Ascend/op-plugin, its test of npu_gather_pa_kv_cache",
            PRACTICE,
            "the plugin never means to read zeros",
        ),
        gather_record(
            "key_cache, value_cache, key, value",
            "contiguous",
            "a contiguous tensor",
            NO_DOCSTRING,
            "caches may be strided, results may not",
            GATHER_DOCS,
            PRACTICE,
        ),
    ],
)

UPDATE_RULES = Family(
    UPDATE_NAME,
    [
        update_record(
            "lse, local_out",
            "parts",
            "1 to 16 parts, as many of lse as of local_out",
            NO_DOCSTRING,
            "the same",
            UPDATE_DOCS,
            PRACTICE,
        ),
        update_record(
            "local_out",
            "part form",
            "[rows, head_dim], all alike, in float32, float16 or bfloat16",
            NO_DOCSTRING,
            "the same",
            UPDATE_DOCS,
            PRACTICE,
        ),
        update_record(
            "local_out",
            "head_dim",
            "a multiple of 8 from 8 to 512",
            NO_DOCSTRING,
            "the same",
            UPDATE_DOCS,
            PRACTICE,
        ),
        update_record(
            "lse",
            "lse form",
            "float32 of rank 1, one value for each row",
            NO_DOCSTRING,
            "the same",
            UPDATE_DOCS,
            PRACTICE,
        ),
        update_record(
            "update_type",
            "update_type",
            "0 or 1",
            NO_DOCSTRING,
            "1 also gives the merged lse",
            UPDATE_DOCS,
            PRACTICE,
        ),
    ],
)


def gather_pa_kv_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    seq_offset: torch.Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    """Write rows of both caches, one request after the other, into ``key`` and ``value``."""
    demand = GATHER_RULES.call(GATHER).demand
    alike = key_cache.dim() == value_cache.dim() == 4
    alike = alike and key_cache.shape[:3] == value_cache.shape[:3]
    demand("cache form", alike, f"{shape_of(key_cache)} and {shape_of(value_cache)}")
    for argument, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        fits = shape_of(rows)[1:] == shape_of(cache)[2:] and rows.dtype == cache.dtype
        demand("result form", fits, f"{shape_of(rows)} {rows.dtype}", argument)
        demand("contiguous", rows.is_contiguous(), f"strides {rows.stride()}", argument)
        demand(
            "contiguous", cache.is_contiguous(), f"strides {cache.stride()}", f"{argument}_cache"
        )
    offsets = torch.zeros_like(block_tables[:, 0]) if seq_offset is None else seq_offset
    lengths = seq_lens.diff() if is_seq_lens_cumsum else seq_lens
    count = (len(block_tables),)
    fits = block_tables.dim() == 2 and shape_of(lengths) == shape_of(offsets) == count
    dtypes = {block_tables.dtype, seq_lens.dtype, offsets.dtype}
    fits = fits and len(dtypes) == 1 and dtypes <= {torch.int32, torch.int64}
    demand("integers", fits, f"{shape_of(block_tables)}, {shape_of(seq_lens)}, {dtypes}")
    total = int(lengths.sum())
    demand("rows", len(key) == len(value) == total, f"{len(key)}, {len(value)} for {total}", "key")
    num_blocks, block_size = key_cache.shape[:2]
    demand("offset", not (offsets % block_size).any(), offsets.tolist())
    wanted = []
    for row, start, length in zip(block_tables, offsets.tolist(), lengths.tolist()):
        first = start // block_size
        blocks = row[first : first + -(-length // block_size)].long()
        room = len(blocks) * block_size >= length
        fits = room and bool(((blocks >= 0) & (blocks < num_blocks)).all())
        demand("block ids", fits, f"{row.tolist()} of {num_blocks} blocks, {length} from {start}")
        slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
        wanted.append(slots[:length])
    indices = torch.cat(wanted) if wanted else torch.empty(0, dtype=torch.int64)
    for rows, cache in ((key, key_cache), (value, value_cache)):
        touch(cache, indices // block_size)
        rows.copy_(cache.flatten(0, 1)[indices])


def attention_update(
    lse: list[torch.Tensor], local_out: list[torch.Tensor], update_type: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over all parts, and their log-sum-exps if ``update_type`` is 1."""
    demand = UPDATE_RULES.call(UPDATE).demand
    given = f"{len(lse)} of lse, {len(local_out)} of local_out"
    demand("parts", 0 < len(lse) == len(local_out) <= MOST_PARTS, given, "lse")
    demand("update_type", update_type in (0, 1), update_type)
    first = local_out[0]
    for out in local_out:
        fits = out.dim() == 2 and out.shape == first.shape and out.dtype == first.dtype
        fits = fits and out.dtype in (torch.float32, torch.float16, torch.bfloat16)
        demand("part form", fits, f"{shape_of(out)} {out.dtype}")
    size = first.shape[1]
    demand("head_dim", size % 8 == 0 and 8 <= size <= 512, size)
    for each in lse:
        fits = shape_of(each) == (len(first),) and each.dtype == torch.float32
        demand("lse form", fits, f"{shape_of(each)} {each.dtype}")
    sums = torch.stack(list(lse))
    merged = sums.logsumexp(0)
    shares = (sums - merged).exp().unsqueeze(-1)
    result = (torch.stack([out.float() for out in local_out]) * shares).sum(0).to(first.dtype)
    return result, merged if update_type else merged.new_empty(0)
