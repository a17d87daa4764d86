"""Limits of one call of fused attention, and the calls that serve a step which breaks them.

The operators are made up: the real kernels' file is imported over a torch_npu that only notes what
it is called with and computes each call by itself. ``tests/npu`` runs the real one.
"""

import importlib
import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_npu_prep.attention.kernels import LayerShape
from vllm_npu_prep.attention.kernels.latent import LatentShape, Planes
from vllm_npu_prep.prep.state import AttentionState

HEADS, SIZE, BLOCK = 2, 8, 4


class Operators:
    """Notes calls of fused attention, and writes the sum of each request's keys to its queries."""

    def __init__(self) -> None:
        self.calls: list[dict] = []
        self.npu_fused_infer_attention_score = SimpleNamespace(out=self.attend)
        self.npu_fused_infer_attention_score_v2 = SimpleNamespace(out=self.attend_latent)

    def attend(self, query, *, key, out, actual_seq_lengths, actual_seq_lengths_kv, **others):
        self.calls.append({"ends": actual_seq_lengths, "kv": actual_seq_lengths_kv, **others})
        assert len(query) == len(out[0]) == actual_seq_lengths[-1]
        starts = [0, *actual_seq_lengths]
        for req, length in enumerate(actual_seq_lengths_kv):
            if "block_table" in others:
                rows = key[others["block_table"][req].long()].flatten(0, 1)[:length]
            else:
                rows = key[starts[req] : starts[req + 1]].flatten(1)
            out[0][starts[req] : starts[req + 1]] = rows.sum()

    def attend_latent(self, query, *, actual_seq_qlen, actual_seq_kvlen, query_rope, **others):
        assert len(query_rope) == len(query)
        lengths = {"actual_seq_lengths": actual_seq_qlen, "actual_seq_lengths_kv": actual_seq_kvlen}
        self.attend(query, **lengths, **others)

    def npu_fusion_attention(self, query, key, value, heads, layout, **others):
        self.calls.append({"ends": others["actual_seq_qlen"], **others})
        out = torch.empty_like(query)
        starts = [0, *others["actual_seq_qlen"]]
        for first, end in pairwise(starts):
            out[first:end] = key[first:end].sum()
        return out, None


@pytest.fixture
def fia(monkeypatch):
    """The module of the kernels, and what its operators were called with."""
    operators = Operators()
    monkeypatch.setitem(sys.modules, "torch_npu", operators)
    names = [f"vllm_npu_prep.attention.kernels.{name}" for name in ("fia", "latent_fia")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module, latent = map(importlib.import_module, names)
    yield SimpleNamespace(module=module, latent=latent, calls=operators.calls)
    for name in names:
        sys.modules.pop(name, None)


def step(query_lens: list[int], seq_lens: list[int], **others) -> SimpleNamespace:
    starts = np.cumsum([0, *query_lens], dtype=np.int32)
    width = -(-max(seq_lens) // BLOCK)
    tables = (torch.arange(len(seq_lens) * width, dtype=torch.int32) % 6).view(-1, width)
    settings = {
        "causal": True,
        "in_full_graph": False,
        "max_query_len": max(query_lens),
        "attn_state": AttentionState.ChunkedPrefill,
        "attn_mask": None,
        "sliding_window": None,
        "kernel_plan": None,
        "block_tables": tables,
        "query_start_loc_np": starts,
        "seq_lens_np": np.array(seq_lens, np.int32),
        **others,
    }
    return SimpleNamespace(**settings)


def attend(kernels, metadata) -> torch.Tensor:
    torch.manual_seed(0)
    tokens = int(metadata.query_start_loc_np[-1])
    query, key, value = torch.randn(3, tokens, HEADS, SIZE)
    cache = torch.randn(2, 6, BLOCK, HEADS, SIZE)
    output = torch.full((tokens, HEADS, SIZE), float("nan"))
    layer = LayerShape(HEADS, HEADS, SIZE, 1.0)
    kernels.attend(query, (key, value), cache, metadata, layer, output)
    return output


def blocks_of(call: dict) -> int:
    return sum(-(-length // BLOCK) for length in call["kv"])


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "calls"),
    [
        ([1, 3, 2], [9, 12, 8], 2),  # 3, 3 and 2 blocks, shared ones counted twice; the cache has 6
        ([1] * 6, [1] * 6, 1),
        ([1] * 7, [1] * 7, 2),
        ([2, 5], [24, 5], 2),  # as long as the cache
    ],
)
def test_a_batch_with_too_many_blocks_is_several_calls(fia, query_lens, seq_lens, calls):
    whole = attend(fia.module.FiaKernels(), step(query_lens, seq_lens))
    assert len(fia.calls) == 1 and not whole.isnan().any()
    fia.calls.clear()
    metadata = step(query_lens, seq_lens)
    kernels = fia.module.FiaKernels(limits_batches=True)
    for _ in range(2):  # layers
        assert torch.equal(attend(kernels, metadata), whole)
    assert len(fia.calls) == 2 * calls
    assert all(blocks_of(call) <= 6 for call in fia.calls)


def attend_latent(kernels, metadata) -> torch.Tensor:
    torch.manual_seed(0)
    shape = LatentShape(HEADS, SIZE, 4, SIZE, SIZE, 1.0)
    planes = Planes(torch.randn(6, BLOCK, 1, SIZE), torch.randn(6, BLOCK, 1, 4))
    query = torch.randn(int(metadata.query_start_loc_np[-1]), HEADS, SIZE)
    output = torch.full_like(query, float("nan"))
    kernels.attend_latent(query, query[..., :4], planes, metadata, shape, output)
    return output


@pytest.mark.parametrize("in_full_graph", [False, True])
def test_latent_decodes_with_too_many_blocks_are_several_calls(fia, in_full_graph):
    lengths = [1, 3, 2], [9, 12, 8]
    whole = attend_latent(fia.latent.LatentFiaKernels(), step(*lengths))
    assert len(fia.calls) == 1 and not whole.isnan().any()
    fia.calls.clear()
    kernels = fia.latent.LatentFiaKernels(limits_batches=True)
    metadata = step(*lengths, in_full_graph=in_full_graph)
    for _ in range(2):  # layers
        assert torch.equal(attend_latent(kernels, metadata), whole)
    assert len(fia.calls) == (2 if in_full_graph else 4)
    assert in_full_graph or all(blocks_of(call) <= 6 for call in fia.calls)


def test_prompts_are_split_by_their_number_alone(fia, monkeypatch):
    monkeypatch.setattr(fia.module, "MAX_LENGTHS", 2)
    lengths = [9, 12, 8]
    settings = {"attn_state": AttentionState.PrefillNoCache}
    whole = attend(fia.module.FiaKernels(), step(lengths, lengths, **settings))
    fia.calls.clear()
    kernels = fia.module.FiaKernels(limits_batches=True)
    assert torch.equal(attend(kernels, step(lengths, lengths, **settings)), whole)
    assert [call["ends"] for call in fia.calls] == [[9, 21], [8]]


def test_a_full_graph_is_one_call(fia):
    kernels = fia.module.FiaKernels(limits_batches=True)
    attend(kernels, step([1] * 7, [1] * 7, in_full_graph=True))
    assert len(fia.calls) == 1


def test_encoders_call_the_operator_without_a_cache(fia, monkeypatch):
    monkeypatch.setattr(fia.module, "MAX_ENCODED", 2)
    lengths = [2, 3, 1]
    mask = torch.ones(4, 4, dtype=torch.int8).triu_(1)
    settings = {"causal": False, "attn_state": AttentionState.PrefillNoCache}
    output = attend(fia.module.FiaKernels(), step(lengths, lengths, **settings))
    assert not output.isnan().any()
    assert [call["ends"] for call in fia.calls] == [[2, 5], [1]]
    assert "atten_mask" not in fia.calls[0] and "input_layout" not in fia.calls[0]
    window = step([3], [3], **settings, sliding_window=3, attn_mask=mask)
    attend(fia.module.FiaKernels(), window)
    call = fia.calls[-1]
    assert call["sparse_mode"] == 4 and call["atten_mask"].dtype == torch.bool
    assert (call["pre_tockens"], call["next_tockens"]) == (2, 2)
