"""References of the operators that prefills of latent attention need beside fused attention.

``npu_gather_pa_kv_cache`` gathers rows of a paged cache, ``npu_attention_update`` merges attention
over several sets of rows.
"""

import torch

from ascend_emulator import profiles
from ascend_emulator.api import touch
from ascend_emulator.operators.constraint import Call, shape_of

GATHER = "npu::npu_gather_pa_kv_cache"
UPDATE = "npu::npu_attention_update"
SCATTER = "npu::npu_scatter_nd_update_"
SCATTERED = (
    *(torch.float32, torch.float16, torch.bfloat16),
    *(torch.bool, torch.int64, torch.int8),
)
MOST_PARTS = 16


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
    demand = Call("npu_gather_pa_kv_cache", GATHER).demand
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
    demand = Call("npu_attention_update", UPDATE).demand
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


def scatter_nd_update_(
    input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor
) -> torch.Tensor:
    """Write `updates` where the last dimension of `indices` points, in place.

    From CANN 9.1 on, what a row of -1 points at is left out.
    """
    demand = Call("npu_scatter_nd_update", SCATTER).demand
    demand("dtype", input.dtype in SCATTERED, input.dtype)
    demand("same dtype", updates.dtype == input.dtype, updates.dtype)
    demand("indices dtype", indices.dtype in (torch.int32, torch.int64), indices.dtype)
    fits = indices.dim() >= 2 and 1 <= indices.shape[-1] <= input.dim() <= 8
    given = f"{shape_of(indices)} and {shape_of(updates)} for {shape_of(input)}"
    demand("shapes", fits, given)
    depth = indices.shape[-1]
    fits = shape_of(updates) == (*indices.shape[:-1], *input.shape[depth:])
    demand("shapes", fits, given)
    places = indices.reshape(-1, depth).long()
    left_out, sizes = (places == -1).all(-1), torch.tensor(input.shape[:depth])
    outside = places[((places < 0) | (places >= sizes)).any(-1) & ~left_out].tolist()
    demand("indices range", not outside, f"{outside} of {shape_of(input)}")
    profile = profiles.current()
    fits = not left_out.any() or not (profile.release == "8.5" or profile.documentation)
    demand("padding", fits, f"{int(left_out.sum())} rows of -1")
    rows = updates.reshape(-1, *input.shape[depth:])
    touch(input, places[~left_out][:, 0], write=True)
    input[tuple(places[~left_out].unbind(-1))] = rows[~left_out]
    return input
