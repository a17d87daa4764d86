"""Random steps of attention, and what they give by a formula in float64."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vllm_npu_prep.attention.kernels import LayerShape
from vllm_npu_prep.attention.kernels.reference import ReferenceKernels
from vllm_npu_prep.attention.mask_cache import MaskCache
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.prep.mask import MaskForm, plan_mask
from vllm_npu_prep.prep.state import AttentionState

# computed, scheduled tokens of each request
BATCHES = {
    AttentionState.PrefillNoCache: [(0, 5), (0, 1), (0, 17), (0, 4)],
    AttentionState.DecodeOnly: [(5, 1), (40, 1), (17, 1), (16, 1), (1, 1)],
    AttentionState.SpecDecoding: [(5, 3), (40, 3), (16, 3)],
    AttentionState.PrefillCacheHit: [(4, 5), (32, 9), (0, 3)],
    AttentionState.ChunkedPrefill: [(5, 1), (40, 1), (0, 23), (12, 8), (3, 1)],
}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Step:
    """A random step, its cache filled with what earlier steps wrote."""

    def __init__(
        self,
        state,
        seed,
        *,
        form=MaskForm.DENSE,
        window=None,
        causal=True,
        dtype=torch.float32,
        block_size=4,
        heads=(4, 2),
        head_size=8,
        soft_cap=None,
        lengths=None,
        unseen=float("nan"),
        mask_values=None,
    ):
        generator = torch.Generator().manual_seed(seed)
        self.lengths = lengths or BATCHES[state]
        self.window, self.causal, self.soft_cap = window, causal, soft_cap
        num_heads, num_kv_heads = heads
        self.layer = LayerShape(
            num_heads, num_kv_heads, head_size, 1 / math.sqrt(head_size), soft_cap
        )
        query_lens = np.array([n for _, n in self.lengths], np.int32)
        seq_lens = np.array([c + n for c, n in self.lengths], np.int32)
        self.starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        total, max_seq_len = int(query_lens.sum()), int(seq_lens.max())

        def random(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        self.query = random(total, num_heads, head_size)
        self.keys = [random(n, num_kv_heads, head_size) for n in seq_lens]
        self.values = [random(n, num_kv_heads, head_size) for n in seq_lens]
        blocks = [-(-int(n) // block_size) for n in seq_lens]
        pool = (torch.randperm(sum(blocks), generator=generator) + 1).tolist()
        table = torch.zeros(len(blocks), max(blocks) + 2, dtype=torch.int32)
        # Slots that nobody wrote, or that windows have left behind: reading NaN shows.
        shape = (2, sum(blocks) + 1, block_size, num_kv_heads, head_size)
        self.cache = torch.full(shape, unseen, dtype=dtype)
        slots, positions = [], []
        for row, (computed, _) in enumerate(self.lengths):
            ids = [pool.pop() for _ in range(blocks[row])]
            first_seen = 0 if window is None else max(0, computed - window + 1)
            ids[: first_seen // block_size] = [0] * (first_seen // block_size)
            table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            for position in range(first_seen, int(seq_lens[row])):
                block, offset = ids[position // block_size], position % block_size
                if position < computed:
                    self.cache[0, block, offset] = self.keys[row][position]
                    self.cache[1, block, offset] = self.values[row][position]
                else:
                    slots.append(block * block_size + offset)
                    positions.append(position)
        fresh = [slice(c, c + n) for c, n in self.lengths]
        self.key = torch.cat([k[s] for k, s in zip(self.keys, fresh)])
        self.value = torch.cat([v[s] for v, s in zip(self.values, fresh)])
        self.slots = torch.tensor(slots, dtype=torch.int32)
        plan = plan_mask(state, form, total, max_seq_len, sliding_window=window, causal=causal)
        masks = MaskCache(torch.device("cpu"), 512, 1 << 20, dtype, mask_values)
        self.metadata = AscendMetadata(
            attn_state=state,
            attn_mask=masks.build(plan, torch.tensor(positions)),
            block_tables=table if causal else None,
            slot_mapping=self.slots if causal else None,
            query_start_loc=torch.from_numpy(self.starts),
            query_start_loc_np=self.starts,
            seq_lens=torch.from_numpy(seq_lens),
            seq_lens_np=seq_lens,
            num_computed_tokens=torch.from_numpy(seq_lens - query_lens),
            num_reqs=len(blocks),
            max_query_len=int(query_lens.max()),
            max_seq_len=max_seq_len,
            num_actual_tokens=total,
            num_input_tokens=total,
            sliding_window=plan.sliding_window,
            causal=causal,
        )

    def run(self, share_kv=False, kernels: Any = None, device="cpu") -> torch.Tensor:
        kernels = kernels or ReferenceKernels()
        tensors = self.query, self.key, self.value, self.cache, self.slots
        query, key, value, cache, slots = (tensor.to(device) for tensor in tensors)
        metadata = self.metadata
        if device != "cpu":
            names = "attn_mask", "block_tables"
            moved = {name: getattr(metadata, name) for name in names}
            metadata = replace(
                metadata, **{name: t if t is None else t.to(device) for name, t in moved.items()}
            )
        if self.causal:  # else there is no cache
            kernels.write_kv(key, value, cache, slots)
        output = torch.full_like(query, float("nan"))
        own = None if share_kv else (key, value)
        kernels.attend(query, own, cache, metadata, self.layer, output)
        return output.cpu()

    def formula(self) -> torch.Tensor:
        """Softmax attention, one request and head at a time, in float64."""
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        group = self.layer.num_heads // self.layer.num_kv_heads
        for row, (computed, scheduled) in enumerate(self.lengths):
            for head in range(self.layer.num_heads):
                rows = slice(self.starts[row], self.starts[row + 1])
                q = self.query[rows, head].double()
                k = self.keys[row][:, head // group].double()
                v = self.values[row][:, head // group].double()
                scores = q @ k.T * self.layer.scale
                if self.soft_cap:
                    scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
                for i in range(scheduled):
                    for j in range(computed + scheduled):
                        p = computed + i
                        window = math.inf if self.window is None else self.window
                        ahead = j > p if self.causal else j >= p + window
                        if ahead or j <= p - window:
                            scores[i, j] = -math.inf
                out[rows, head] = scores.softmax(-1) @ v
        return out
