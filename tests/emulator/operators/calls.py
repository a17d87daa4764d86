"""Valid calls of every operator, which tests run as they are or spoil in one place."""

import functools
import math

import torch

from ascend_emulator.operators import REFERENCES

FUNCTIONS = {(reference.name, reference.overload): reference.function for reference in REFERENCES}
V1 = "npu::npu_fused_infer_attention_score"
V2 = "npu::npu_fused_infer_attention_score_v2"
V2_NAMES = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "softmax_lse_flag": "return_softmax_lse",
}
MIXED = [(5, 1), (150, 1), (0, 23), (12, 8), (200, 70)]
"""Tokens in the cache and query tokens of each request."""
PROMPTS = [(0, 5), (0, 1), (0, 130), (0, 4)]
DECODES = [(5, 1), (140, 1), (127, 1), (128, 1), (0, 1)]


@functools.cache
def triangle(dtype=torch.int8) -> torch.Tensor:
    """Return the constant mask; shared, so nobody may write to it."""
    return torch.triu(torch.ones(2048, 2048), 1).to(dtype)


class Batch:
    """Random requests, fresh or in a paged cache whose unwritten rows hold NaN.

    ``queries``, ``keys`` and ``values`` are the truth by request: ``[Q, N, D]``, ``[S, Nkv, D]``.
    """

    def __init__(
        self, lengths, seed=0, *, dtype=torch.float16, heads=(4, 2), head_size=16, block_size=128
    ):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.heads, self.head_size = dtype, heads, head_size
        self.block_size, self.lengths = block_size, lengths
        self.query_lens = [query for _, query in lengths]
        self.kv_lens = [context + query for context, query in lengths]
        self.scale = 1 / math.sqrt(head_size)
        self.queries = [self.random(n, heads[0], head_size) for n in self.query_lens]
        self.keys = [self.random(n, heads[1], head_size) for n in self.kv_lens]
        self.values = [self.random(n, heads[1], head_size) for n in self.kv_lens]

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    @property
    def query(self):
        return torch.cat(self.queries)

    def cumulative(self, lengths):
        return torch.tensor(lengths).cumsum(0).tolist()

    def caches(self):
        """K and V ``[num_blocks, block_size, Nkv, D]`` and the table; block 0 belongs to nobody."""
        size = self.block_size
        blocks = [-(-n // size) for n in self.kv_lens]
        ids = torch.randperm(sum(blocks), generator=self.generator) + 1
        table = torch.zeros(len(blocks), max(blocks) + 1, dtype=torch.int32)
        shape = (sum(blocks) + 1, size, self.heads[1], self.head_size)
        caches = [torch.full(shape, float("nan"), dtype=self.dtype) for _ in range(2)]
        for request, owned in enumerate(ids.split(blocks)):
            table[request, : len(owned)] = owned
            for cache, rows in zip(caches, (self.keys[request], self.values[request])):
                for position, row in enumerate(rows):
                    cache[owned[position // size], position % size] = row
        return *caches, table

    def packed(self, **changes):
        """Arguments of v1 in TND over fresh K and V."""
        return {
            "query": self.query,
            "key": torch.cat(self.keys),
            "value": torch.cat(self.values),
            "num_heads": self.heads[0],
            "num_key_value_heads": self.heads[1],
            "scale": self.scale,
            "input_layout": "TND",
            "sparse_mode": 3,
            "atten_mask": triangle(),
            "actual_seq_lengths": self.cumulative(self.query_lens),
            "actual_seq_lengths_kv": self.cumulative(self.kv_lens),
            **changes,
        }

    def paged(self, form=3, **changes):
        """Arguments of v1 in TND over caches of rank 3 or 4."""
        key, value, table = self.caches()
        caches = [
            cache.flatten(2) if form == 3 else cache.transpose(1, 2).contiguous()
            for cache in (key, value)
        ]
        return (
            self.packed(
                key=caches[0],
                value=caches[1],
                block_table=table,
                block_size=self.block_size,
                actual_seq_lengths_kv=self.kv_lens,
            )
            | changes
        )

    def padded(self, layout, **changes):
        """Arguments of v1 in a layout with a batch axis, fresh K and V, no mask."""
        width, kv_width = max(self.query_lens), max(self.kv_lens)
        query = self._side_by_side(self.queries, width, layout)
        key = self._side_by_side(self.keys, kv_width, layout)
        value = self._side_by_side(self.values, kv_width, layout)
        return {
            "query": query,
            "key": key,
            "value": value,
            "num_heads": self.heads[0],
            "num_key_value_heads": self.heads[1],
            "scale": self.scale,
            "input_layout": layout,
            "actual_seq_lengths": self.query_lens,
            "actual_seq_lengths_kv": self.kv_lens,
            **changes,
        }

    def _side_by_side(self, rows, width, layout):
        # Large but finite behind a request's rows, so that reading them shows.
        shape = (len(rows), width, *rows[0].shape[1:])
        padded = torch.full(shape, 100.0, dtype=self.dtype)
        for request, part in enumerate(rows):
            padded[request, : len(part)] = part
        if layout == "BSH":
            return padded.flatten(2)
        return padded.transpose(1, 2).contiguous() if layout.startswith("BNSD") else padded


def call(name, arguments, overload=""):
    """Call a reference as torch's dispatcher does."""
    return FUNCTIONS[name, overload](**arguments)


def fused(arguments, version=1):
    """Call the functional form of v1, or of v2 with its own names."""
    if version == 1:
        return call(V1, arguments)
    return call(V2, {V2_NAMES.get(name, name): value for name, value in arguments.items()})


def decode_arguments(seed=0, dtype=torch.float16, lengths=DECODES, **changes):
    """Arguments of ``_npu_paged_attention``, and the batch."""
    batch = Batch(lengths, seed, dtype=dtype, **changes)
    key_cache, value_cache, table = batch.caches()
    return {
        "query": batch.query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "num_kv_heads": batch.heads[1],
        "num_heads": batch.heads[0],
        "scale_value": batch.scale,
        "block_table": table,
        "context_lens": torch.tensor(batch.kv_lens, dtype=torch.int32),
        "out": torch.full_like(batch.query, float("nan")),
    }, batch


def dense_rows(batch, masked_value):
    """Row of the causal matrix for each query token, ``[T, longest context]``."""
    rows = torch.zeros(sum(batch.query_lens), max(batch.kv_lens), dtype=batch.dtype)
    token = 0
    for context, query_len in batch.lengths:
        for position in range(context, context + query_len):
            rows[token, position + 1 :] = masked_value
            token += 1
    return rows


def splitfuse_arguments(seed=0, dtype=torch.float16, lengths=MIXED, **changes):
    """Arguments of ``_npu_paged_attention_splitfuse``, and the batch."""
    arguments, batch = decode_arguments(seed, dtype, lengths, **changes)
    masked_value = -math.inf if dtype == torch.float16 else -10000.0
    arguments["mask"] = dense_rows(batch, masked_value)
    arguments["seq_len"] = torch.tensor(batch.query_lens, dtype=torch.int32)
    return arguments, batch


def flash_arguments(seed=0, dtype=torch.float16, lengths=PROMPTS, **changes):
    """Arguments of ``_npu_flash_attention``, and the batch."""
    batch = Batch(lengths, seed, dtype=dtype, **changes)
    size = max(batch.query_lens) + 3
    above = torch.triu(torch.ones(size, size), 1).bool()
    masked_value = -math.inf if dtype == torch.float16 else 1.0
    return {
        "query": batch.query,
        "key": torch.cat(batch.keys),
        "value": torch.cat(batch.values),
        "mask": torch.zeros(size, size, dtype=dtype).masked_fill(above, masked_value),
        "seq_len": torch.tensor(batch.query_lens, dtype=torch.int32),
        "scale_value": batch.scale,
        "num_heads": batch.heads[0],
        "num_kv_heads": batch.heads[1],
        "out": torch.full_like(batch.query, float("nan")),
    }, batch


def unpad_arguments(seed=0, dtype=torch.float16, lengths=PROMPTS, **changes):
    """Arguments of ``_npu_flash_attention_unpad``, and the batch."""
    arguments, batch = flash_arguments(seed, dtype, lengths, **changes)
    return {name: value for name, value in arguments.items() if name != "mask"}, batch


def drawing(seed, dtype):
    """Function that draws tensors in turn."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(dtype)


def cache_arguments(seed=0, dtype=torch.float16, slot_name="slot_indices", **changes):
    """Arguments of a cache writer: five tokens, one of them padding."""
    random = drawing(seed, dtype)
    return {
        "key": random(5, 2, 16),
        "value": random(5, 2, 16),
        "key_cache": random(4, 16, 2, 16),
        "value_cache": random(4, 16, 2, 16),
        slot_name: torch.tensor([17, 3, -1, 63, 18], dtype=torch.int32),
        **changes,
    }


def scatter_arguments(seed=0, dtype=torch.float16, **changes):
    """Arguments of ``npu_scatter_pa_kv_cache``."""
    return cache_arguments(seed, dtype, "slot_mapping", **({"cache_mode": "Norm"} | changes))


def mrope_arguments(seed=0, dtype=torch.float16, **changes):
    """Arguments of ``npu_mrope``: five tokens, four heads of 128 in Q, two in K."""
    random = drawing(seed, dtype)
    return {
        "positions": torch.tensor([3, 0, 7, 63, 3]),
        "query": random(5, 512),
        "key": random(5, 256),
        "cos_sin_cache": random(64, 128),
        "head_size": 128,
        **changes,
    }


def matmul_arguments(seed=0, dtype=torch.float16, **changes):
    """Arguments of ``npu_grouped_matmul``: one x, two transposed weights, two biases."""
    random = drawing(seed, dtype)
    of_bias = torch.float16 if dtype == torch.float16 else torch.float32
    return {
        "x": [random(5, 8)] * 2,
        "weight": [random(6, 8).t(), random(4, 8).t()],
        "bias": [random(6).to(of_bias), random(4).to(of_bias)],
        "split_item": 0,
        "group_type": -1,
        **changes,
    }


def strided(tensor):
    """Same shape and values, not contiguous."""
    doubled = torch.stack([tensor, tensor], -1)[..., 0]
    assert not doubled.is_contiguous() and doubled.shape == tensor.shape
    return doubled


FUSION = "npu::npu_fusion_attention"


def fusion_arguments(batch, **changes):
    """Arguments over fresh K and V, without a mask."""
    return {
        "query": batch.query,
        "key": torch.cat(batch.keys),
        "value": torch.cat(batch.values),
        "head_num": batch.heads[0],
        "input_layout": "TND",
        "scale": batch.scale,
        "actual_seq_qlen": batch.cumulative(batch.query_lens),
        "actual_seq_kvlen": batch.cumulative(batch.kv_lens),
    } | changes


def band(size, **changes):
    """Arguments of a window of so many tokens both ways."""
    mask = triangle(torch.uint8)
    limits = {"pre_tockens": size, "next_tockens": size}
    return {"atten_mask": mask, "sparse_mode": 4, **limits, **changes}
