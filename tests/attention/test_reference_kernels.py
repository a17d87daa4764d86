"""The reference family against a formula in float64, and what it refuses as an NPU would."""

import math

import numpy as np
import pytest
import torch

from vllm_npu_prep.attention.kernels import LayerShape, reference
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
    ):
        generator = torch.Generator().manual_seed(seed)
        self.lengths = BATCHES[state]
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
        # Slots that nobody wrote, or that windows have left behind, hold NaN: reading one shows.
        shape = (2, sum(blocks) + 1, block_size, num_kv_heads, head_size)
        self.cache = torch.full(shape, float("nan"), dtype=dtype)
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
        masks = MaskCache(torch.device("cpu"), 64, 1 << 20)
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

    def run(self, share_kv=False) -> torch.Tensor:
        kernels = ReferenceKernels()
        if self.causal:  # else there is no cache
            kernels.write_kv(self.key, self.value, self.cache, self.slots)
        output = torch.full_like(self.query, float("nan"))
        key, value = (None, None) if share_kv else (self.key, self.value)
        kernels.attend(self.query, key, value, self.cache, self.metadata, self.layer, output)
        return output

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


def check(step: Step, **kwargs) -> None:
    tolerance = TOLERANCE[step.query.dtype]
    torch.testing.assert_close(
        step.run(**kwargs).double(), step.formula(), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("state", BATCHES)
@pytest.mark.parametrize("form", MaskForm)
@pytest.mark.parametrize("window", [None, 3, 20])
def test_every_state_form_and_window_equals_the_formula(state, form, window, seed):
    check(Step(state, seed, form=form, window=window))


@pytest.mark.parametrize("state", BATCHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_equals_the_formula_within_tolerance(state, dtype, seed):
    check(Step(state, seed, dtype=dtype))


@pytest.mark.parametrize("state", BATCHES)
@pytest.mark.parametrize("block_size", [1, 2, 16, 128])
def test_any_block_size(state, block_size, seed):
    check(Step(state, seed, block_size=block_size))


@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (8, 1), (12, 4)])
@pytest.mark.parametrize(
    "state",
    [AttentionState.DecodeOnly, AttentionState.ChunkedPrefill, AttentionState.PrefillNoCache],
)
def test_grouped_query_heads(state, heads, seed):
    check(Step(state, seed, heads=heads))


@pytest.mark.parametrize("state", BATCHES)
@pytest.mark.parametrize("form", MaskForm)
def test_logits_soft_cap(state, form, seed):
    check(Step(state, seed, soft_cap=1.5, form=form))


@pytest.mark.parametrize("window", [None, 3, 20])
@pytest.mark.parametrize("form", MaskForm)
@pytest.mark.parametrize("tile_pairs", [16, 1 << 20])
def test_without_causality_tokens_see_both_ways(window, form, tile_pairs, seed, monkeypatch):
    monkeypatch.setattr(reference, "TILE_PAIRS", tile_pairs)
    step = Step(AttentionState.PrefillNoCache, seed, form=form, window=window, causal=False)
    check(step)
    (plan,) = step.metadata.kernel_plan.values()
    assert (len(plan.chunks) > len(step.lengths)) == (tile_pairs == 16)


def test_layers_that_share_kv_read_the_cache(seed):
    for state in BATCHES:
        check(Step(state, seed), share_kv=True)


@pytest.mark.parametrize("state", BATCHES)
@pytest.mark.parametrize("form", MaskForm)
@pytest.mark.parametrize("window", [None, 3])
def test_small_tiles_cut_requests_and_queries_without_changing_the_result(
    state, form, window, seed, monkeypatch
):
    monkeypatch.setattr(reference, "TILE_PAIRS", 16)
    monkeypatch.setattr(reference, "FEWEST_CHUNK_TOKENS", 1)
    monkeypatch.setattr(reference, "TILE_ROWS", 8)
    monkeypatch.setattr(reference, "KEPT_PAIRS", 0)
    step = Step(state, seed, form=form, window=window)
    check(step)
    (plan,) = step.metadata.kernel_plan.values()
    assert not plan.tiles, "large steps keep nothing"
    if state == AttentionState.ChunkedPrefill:
        assert len(plan.chunks) > len(step.lengths), "no request was cut"


@pytest.mark.parametrize("window", [None, 512])
def test_long_prompts_need_memory_in_proportion_to_their_length(window, seed):
    """A tile is bounded in pairs and in rows, whatever the step; of a window it reads no more."""
    for query_len, seq_len, requests in [(4096, 65536, 1), (1, 4096, 256), (700, 700, 9)]:
        lengths = np.full(requests, query_len, np.int32)
        metadata = Step(AttentionState.ChunkedPrefill, seed).metadata
        metadata.attn_mask, metadata.sliding_window = None, window
        metadata.num_reqs = requests
        metadata.num_actual_tokens = int(lengths.sum())
        metadata.seq_lens_np = np.full(requests, seq_len, np.int32)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        metadata.query_start_loc_np = starts
        metadata.block_tables = torch.zeros(requests, 1, dtype=torch.int32)
        plan = reference._plan(metadata, int(lengths.sum()))
        assert sum(c.query_len for chunks in plan.chunks for c in chunks) == lengths.sum()
        for chunks in plan.chunks:
            longest = max(c.num_columns for c in chunks)
            pairs = len(chunks) * longest * max(c.query_len for c in chunks)
            assert pairs <= reference.TILE_PAIRS
            assert len(chunks) == 1 or len(chunks) * longest <= reference.TILE_ROWS
            assert window is None or longest < 2 * window


@pytest.mark.parametrize("state", set(BATCHES) - {AttentionState.DecodeOnly})
@pytest.mark.parametrize("form", MaskForm)
def test_a_wrong_mask_gives_a_wrong_result(state, form, seed):
    step = Step(state, seed, form=form)
    right = step.run()
    step.metadata.attn_mask = torch.zeros_like(step.metadata.attn_mask)
    step.metadata.kernel_plan = None
    assert not torch.allclose(step.run(), right, atol=1e-2)


def spoil(step: Step, what: str) -> None:
    metadata = step.metadata
    if what == "slots of 64 bits":
        step.slots = step.slots.long()
    elif what == "fewer slots than tokens":
        step.slots = step.slots[:-1]
    elif what == "strided K":
        step.key = step.key.repeat(1, 2, 1)[:, ::2]
    elif what == "interleaved planes":
        step.cache = torch.stack([step.cache[0], step.cache[1]], -1).movedim(-1, 0)
    elif what == "cache of another dtype":
        step.cache = step.cache.half()
    elif what == "block table of 64 bits":
        metadata.block_tables = metadata.block_tables.long()
    elif what == "one row less":
        metadata.block_tables = metadata.block_tables[:-1]
    elif what == "lengths not cumulative":
        lengths = metadata.query_lens
        metadata.query_start_loc_np = np.concatenate([[0], lengths]).astype(np.int32)
    elif what == "sequence shorter than its query":
        metadata.seq_lens_np = metadata.seq_lens_np * 0 + 1
    elif what == "mask too narrow":
        metadata.attn_mask = metadata.attn_mask[:, :-1]
    elif what == "mask of rank 1":
        metadata.attn_mask = metadata.attn_mask[0]
    elif what == "constant mask too small":
        metadata.attn_mask = torch.ones(8, 8, dtype=torch.int8)
    else:
        raise ValueError(what)


@pytest.mark.parametrize(
    "what",
    [
        "slots of 64 bits",
        "fewer slots than tokens",
        "strided K",
        "interleaved planes",
        "cache of another dtype",
        "block table of 64 bits",
        "one row less",
        "lengths not cumulative",
        "sequence shorter than its query",
        "mask too narrow",
        "mask of rank 1",
        "constant mask too small",
    ],
)
def test_what_an_npu_kernel_rejects_is_rejected(what, seed):
    step = Step(AttentionState.ChunkedPrefill, seed)
    step.run()
    step.metadata.kernel_plan = None
    spoil(step, what)
    with pytest.raises(AssertionError):
        step.run()
