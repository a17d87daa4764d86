"""Sparse attention of the families of the CPU: choices, and attention over them, in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_npu_prep.attention.kernels import sparse
from vllm_npu_prep.attention.kernels.latent import make_latent_kernels
from vllm_npu_prep.attention.kernels.sparse import (
    IndexShape,
    best_positions,
    make_sparse_kernels,
)
from vllm_npu_prep.prep.choices import wrong_choice
from vllm_npu_prep.prep.mask import compressed_mask
from vllm_npu_prep.verify.latent import LatentForm, LatentStep, shape_of

SHAPE = shape_of(3, 24, 8, 12)
MASK = torch.from_numpy(compressed_mask())
TOPK, HEADS, WIDTH, BLOCK = 6, 5, 10, 8
INDEXER = IndexShape(HEADS, WIDTH, TOPK, 4)
STEPS = {
    "decodes": ((5, 1), (16, 1), (30, 1), (3, 1)),
    "drafts": ((5, 3), (40, 2), (3, 1)),
    "prompts": ((0, 5), (0, 23)),
    "mixed": ((7, 1), (33, 3), (50, 9), (0, 6)),
    "short": ((0, 5), (3, 1)),  # nobody sees more than is chosen
}
on_cpu = pytest.mark.parametrize("family", ["compiled", "reference"])


class SparseStep(LatentStep):
    """A step of latent attention with an indexer: its queries, weights, and keys by request."""

    def __init__(self, lengths, family, seed, dtype=torch.float32):
        form = LatentForm(lengths, SHAPE, dtype, BLOCK, 1, 1)
        super().__init__(form, torch.device("cpu"), make_latent_kernels(family), MASK, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        num_tokens = len(self.query)
        self.index_query = torch.randn(num_tokens, HEADS, WIDTH, generator=generator).to(dtype)
        self.weights = torch.randn(num_tokens, HEADS, generator=generator).to(dtype)
        self.keys = [torch.randn(n, WIDTH, generator=generator).to(dtype) for n in self.seq_lens]
        self.sparse = make_sparse_kernels(family)

    def choose(self):
        """What the kernels choose, int32 ``[num_tokens, TOPK]``."""
        blocks = len(self.planes.latent)
        plane = torch.full((blocks, BLOCK, 1, WIDTH), float("nan"), dtype=self.form.dtype)
        past = [keys[:n] for keys, n in zip(self.keys, self.form.contexts)]
        slots = self.slots_of([range(n) for n in self.form.contexts])
        plane.view(-1, WIDTH)[torch.as_tensor(slots).long()] = torch.cat(past)
        own = self.own_rows(self.keys)
        self.sparse.write_keys(own, plane, self.metadata)
        chosen = torch.full((len(self.query), TOPK), 99, dtype=torch.int32)
        self.sparse.choose(self.index_query, self.weights, plane, self.metadata, chosen)
        return chosen

    def attend(self, chosen):
        latent, rope = (self.own_rows(rows)[:, None] for rows in (self.latent, self.rope))
        self.kernels.write(latent, rope, self.planes, self.metadata.slot_mapping)
        query_rope = self.query[..., SHAPE.qk_nope_head_dim :].contiguous()
        given = self.absorbed, query_rope, self.planes, chosen, self.metadata, SHAPE
        return self.sparse.attend_chosen(*given)

    def tokens(self):
        """Request and position of each token."""
        for request, (computed, scheduled) in enumerate(self.form.lengths):
            yield from ((request, computed + i) for i in range(scheduled))


def scores_of(step, token, request, position):
    """Of all positions that a token may see, float64."""
    keys = step.keys[request][: position + 1].double()
    of_heads = (step.index_query[token].double() @ keys.T).relu()
    return (step.weights[token].double()[:, None] * of_heads).sum(0)


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_tokens_choose_the_best_positions_they_see(name, dtype, family, seed):
    step = SparseStep(STEPS[name], family, seed, dtype)
    chosen = step.choose()
    for token, (request, position) in enumerate(step.tokens()):
        scores = scores_of(step, token, request, position)
        best = sorted(scores.topk(min(TOPK, position + 1)).indices.tolist())
        rest = [-1] * (TOPK - len(best))
        assert chosen[token].tolist() == best + rest, (token, position)


@on_cpu
@pytest.mark.parametrize("name", STEPS)
def test_attention_sees_the_rows_that_were_chosen(name, family, seed):
    step = SparseStep(STEPS[name], family, seed)
    chosen = step.choose()
    output = step.attend(chosen)
    for token, (request, _) in enumerate(step.tokens()):
        rows = chosen[token][chosen[token] >= 0].long()
        latent = step.latent[request][rows].double()
        keys = torch.cat((latent, step.rope[request][rows].double()), -1)
        rope = step.query[token, :, SHAPE.qk_nope_head_dim :]
        query = torch.cat((step.absorbed[token], rope), -1).double()
        expected = (query @ keys.T * SHAPE.scale).softmax(-1) @ latent
        torch.testing.assert_close(output[token].double(), expected, atol=1e-5, rtol=1e-5)


def test_scores_are_computed_in_bounded_pieces(monkeypatch, seed):
    whole = SparseStep(STEPS["mixed"], "compiled", seed).choose()
    monkeypatch.setattr(sparse, "PIECE_BYTES", 4 * HEADS * 60)  # a token at a time, or two
    assert torch.equal(SparseStep(STEPS["mixed"], "compiled", seed).choose(), whole)


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made by operators held at once."""

    def __init__(self):
        super().__init__()
        self.peak, self._live = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if torch.is_tensor(each):
                storage = each.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


@pytest.mark.parametrize("lengths", [((30_000, 8),), ((60, 1900),)], ids=["long", "many tokens"])
def test_choosing_takes_the_bytes_that_are_stated(lengths, seed):
    step = SparseStep(lengths, "compiled", seed)
    with LiveBytes() as live:
        step.choose()
    stated = step.sparse.choosing_bytes(INDEXER, max(step.seq_lens), len(step.query))
    own = 4 * len(step.query) * TOPK + 4 * WIDTH * sum(step.seq_lens)  # what the test makes
    assert stated / 4 < live.peak < stated + own


def test_of_equal_scores_the_earlier_position_is_chosen():
    never = float("-inf")
    scores = torch.tensor([[1.0, 2, 2, 0, 2, never], [0.0] * 6, [3.0, *[never] * 5]])
    assert best_positions(scores, 2).tolist() == [[1, 2], [0, 1], [0, -1]]


def test_scores_that_are_not_numbers_choose_allowed_positions(seed):
    """Attention reads no slot of another request, and none that does not exist."""
    step = SparseStep(STEPS["mixed"], "compiled", seed)
    step.index_query[4] = float("nan")
    step.index_query[12] = float("inf")
    positions = np.array([position for _, position in step.tokens()])
    assert wrong_choice(step.choose().numpy(), positions) is None


@given(st.integers(0, 1 << 30), st.integers(1, 9), st.data())
def test_wrong_choices_are_found(seed, topk, data):
    rng = np.random.default_rng(seed)
    positions = rng.integers(0, 20, rng.integers(1, 6))
    chosen = np.full((len(positions), topk), -1, np.int32)
    for row, position in zip(chosen, positions):
        count = min(topk, position + 1)
        row[:count] = rng.permutation(position + 1)[:count]
    assert wrong_choice(chosen, positions) is None
    token = data.draw(st.integers(0, len(positions) - 1))
    count = min(topk, int(positions[token]) + 1)
    place = data.draw(st.integers(0, count - 1))
    kinds = ["future", "missing"] + ["twice"] * (count > 1) + ["behind"] * (count < topk)
    match data.draw(st.sampled_from(kinds)):
        case "future":
            chosen[token, place] = positions[token] + 1
            rule = "last position chosen"
        case "missing":
            chosen[token, place] = -1
            rule = "positions chosen"
        case "twice":
            chosen[token, place] = chosen[token, (place + 1) % count]
            rule = "different positions chosen"
        case "behind":
            chosen[token, count] = 0
            rule = "different positions chosen"
    found = wrong_choice(chosen, positions)
    assert found is not None and (found.token, found.rule) == (token, rule)
