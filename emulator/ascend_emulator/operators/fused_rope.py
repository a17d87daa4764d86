"""What fused attention demands of calls with ``query_rope`` and ``key_rope`` (latent attention).

Two forms exist. *Absorbed*: a head size of 512 over latent rows, which are keys and values of one
K/V head. *Projected*: a head size of 128 over K and V of every head. Both reach kernel V3.
"""

import torch

from ascend_emulator import profiles
from ascend_emulator.operators.constraint import shape_of
from ascend_emulator.operators.fused_arguments import LATENT_HEAD_SIZE, FusedAttention

NUM_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
ROPE_SIZE = 64
PROJECTED_HEAD_SIZE = 128
OF_LATENT_ROWS = ("TND_NTD", "BNSD_NBSD")


def check_rope(fused: FusedAttention) -> None:
    """Refuse what the kernel refuses of calls with rope, in every release."""
    demand = fused.demand_of("rope")
    query_rope, key_rope = fused.query_rope, fused.key_rope
    if not fused.has_rope:
        layout = fused.input_layout
        demand("layout with rope", layout not in OF_LATENT_ROWS, f"{layout} without rope")
        return
    given = ["none" if rope is None else shape_of(rope) for rope in (query_rope, key_rope)]
    demand("both ropes", query_rope is not None and key_rope is not None, given)
    assert query_rope is not None and key_rope is not None
    size = fused.head_size
    layouts = ("TND", *OF_LATENT_ROWS) if size == LATENT_HEAD_SIZE else ("TND",)
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
        is_copied = argument == "query_rope" or profiles.current().release == "8.5"
        fits = is_copied or rope.is_contiguous()
        demand("contiguous rope", fits, f"strides {rope.stride()}", argument)
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
    demand = fused.demand_of("rope")
    if fused.is_absorbed:
        demand("query tokens over latent rows", fused.query_width <= 16, fused.query_width)
    else:
        is_bfloat16 = fused.query.dtype == torch.bfloat16
        demand("bfloat16 of projected keys", is_bfloat16, fused.query.dtype)
        demand("no cache of projected keys", not fused.is_paged, "a block table")
    if fused.is_paged:
        demand("documented block size with rope", fused.block_size in (16, 128), fused.block_size)
