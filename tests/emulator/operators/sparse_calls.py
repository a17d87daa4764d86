"""Arguments of valid calls of both operators of sparse attention."""

from functools import partial

import torch

from tests.emulator.operators.formula import random
from tests.emulator.operators.layer_calls import int32

INDEXER = "npu::npu_lightning_indexer"
ATTENTION = "npu::npu_sparse_flash_attention"
LENGTHS = ((5, 1), (130, 3), (0, 4), (40, 2))
"""Keys before the step and tokens in it, by request."""

INDEX_HEAD, LATENT, ROPE = 128, 512, 64


def table_of(lengths, block_size, generator):
    """A block table for requests whose blocks lie anywhere; block 0 is nobody's."""
    needed = [-(-sum(pair) // block_size) for pair in lengths]
    ids = (torch.randperm(sum(needed), generator=generator) + 1).int()
    table = torch.zeros(len(lengths), max(needed) + 1, dtype=torch.int32)
    for row, own in zip(table, ids.split(needed)):
        row[: len(own)] = own
    return table


def requests_of(lengths, block_size, names, generator):
    ends = torch.tensor([new for _, new in lengths]).cumsum(0)
    return {
        "actual_seq_lengths_query": ends.int(),
        names[0]: int32(*(sum(pair) for pair in lengths)),
        "block_table": table_of(lengths, block_size, generator),
        "layout_query": "TND",
        names[1]: "PA_BSND",
    }


def indexer(
    lengths=LENGTHS,
    seed=0,
    *,
    heads=8,
    block_size=64,
    sparse_count=16,
    dtype=torch.bfloat16,
    padding=0,
    **changes,
):
    """A choice among keys in a cache; rows of nobody are large and would be chosen."""
    generator = torch.Generator().manual_seed(seed)
    names = "actual_seq_lengths_key", "layout_key"
    given = requests_of(lengths, block_size, names, generator)
    tokens = sum(new for _, new in lengths) + padding
    drawn = partial(random, dtype=dtype)
    key = drawn(int(given["block_table"].max()) + 2, block_size, 1, INDEX_HEAD, seed=seed)
    for row, (old, new) in zip(given["block_table"], lengths):
        key[row[(old + new) // block_size], (old + new) % block_size :] = 30
    return {
        "query": drawn(tokens, heads, INDEX_HEAD, seed=seed + 1),
        "key": key,
        "weights": drawn(tokens, heads, seed=seed + 2),
        **given,
        "sparse_count": sparse_count,
        **changes,
    }


def choice_of(lengths, count, generator):
    """A choice at random: different positions up to each token, and -1 behind them."""
    rows = []
    for old, new in lengths:
        for position in range(old, old + new):
            own = torch.randperm(position + 1, generator=generator)[:count].int()
            rows.append(torch.nn.functional.pad(own, (0, count - len(own)), value=-1))
    return torch.stack(rows)[:, None]


def attention(
    lengths=LENGTHS,
    seed=0,
    *,
    heads=4,
    block_size=64,
    count=16,
    dtype=torch.bfloat16,
    **changes,
):
    generator = torch.Generator().manual_seed(seed)
    names = "actual_seq_lengths_kv", "layout_kv"
    given = requests_of(lengths, block_size, names, generator)
    tokens, blocks = sum(new for _, new in lengths), int(given["block_table"].max()) + 2
    drawn = partial(random, dtype=dtype)
    key = drawn(blocks, block_size, 1, LATENT, seed=seed)
    return {
        "query": drawn(tokens, heads, LATENT, seed=seed + 1),
        "key": key,
        "value": key,
        "sparse_indices": choice_of(lengths, count, generator),
        "scale_value": 0.05,
        **given,
        "query_rope": drawn(tokens, heads, ROPE, seed=seed + 2),
        "key_rope": drawn(blocks, block_size, 1, ROPE, seed=seed + 3),
        "attention_mode": 2,
        **changes,
    }


def side_by_side(rows, width):
    """Rows of requests one beside the other, ``[B, width, ...]``; others are large."""
    padded = torch.full((len(rows), width, *rows[0].shape[1:]), 30.0, dtype=rows[0].dtype)
    for own, part in zip(padded, rows):
        own[: len(part)] = part
    return padded


def fresh(arguments, planes, layout):
    """The same call over fresh keys, in the layout of the queries."""
    names = [name for name in arguments if name.startswith("actual_seq_lengths_")]
    queries, keys = (arguments[name] for name in names)
    counts = queries.diff(prepend=int32(0)).tolist()
    made = dict(arguments)
    for name in planes:
        rows = [
            arguments[name][row.long()].flatten(0, 1)[:length]
            for row, length in zip(arguments["block_table"], keys.tolist())
        ]
        made[name] = torch.cat(rows) if layout == "TND" else side_by_side(rows, int(keys.max()))
    if layout == "BSND":
        own = ("query", "weights", "query_rope", "sparse_indices")
        for name in set(own) & set(arguments):
            made[name] = side_by_side(arguments[name].split(counts), max(counts))
        made[names[0]] = int32(*counts)
    else:
        made[names[1]] = keys.cumsum(0).int()
    layouts = {name: layout for name in arguments if name.startswith("layout_")}
    return made | layouts | {"block_table": None}
