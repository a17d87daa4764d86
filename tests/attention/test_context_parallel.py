"""Attention over contexts that ranks share equals attention over whole contexts."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport

from tests.helpers.thread_ranks import Group, on_ranks
from vllm_npu_prep.attention.backend import AscendMetadataBuilder
from vllm_npu_prep.attention.context_parallel import (
    attend_dcp,
    merge_over_ranks,
    merge_partials,
    only_rows,
    own_of,
    rows_of,
)
from vllm_npu_prep.attention.kernels import Attended, LayerShape
from vllm_npu_prep.attention.kernels.reference import ReferenceKernels
from vllm_npu_prep.attention.latent import ContextChunk, Prefills
from vllm_npu_prep.attention.latent_dcp import share_prefills
from vllm_npu_prep.attention.metadata import AscendMetadata
from vllm_npu_prep.prep.dcp import DCPRank
from vllm_npu_prep.prep.state import AttentionState

NO_KEY = float("-inf")


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def share_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Attended:
    """By the definition: ``[T, H, D]`` over ``[S, D]``, in float64."""
    scores = query.double() @ key.double().T  # [T, H, S]
    weights = scores.exp()
    sums = weights.sum(-1)
    output = (
        (weights / sums.unsqueeze(-1)) @ value.double()
        if len(key)
        else torch.zeros(*query.shape[:2], value.shape[-1])
    )
    return Attended(output.float(), sums.log().float())


@pytest.mark.parametrize("cuts", [[3, 4], [1, 6], [0, 2], [7, 7], [0, 0]])
def test_merged_shares_are_attention_over_all_keys(cuts):
    """Shares without keys count nothing."""
    query, key, value = drawn(0, 5, 2, 4) * 3, drawn(1, 7, 4), drawn(2, 7, 6)
    borders = [0, *cuts, 7]
    shares = [share_of(query, key[a:b], value[a:b]) for a, b in pairwise(borders)]
    merged, whole = merge_partials(shares), share_of(query, key, value)
    torch.testing.assert_close(merged.output, whole.output)
    torch.testing.assert_close(merged.lse, whole.lse)


def test_tokens_without_any_key_get_zeros():
    nothing = Attended(torch.full((1, 2, 3), 7.0), torch.full((1, 2), NO_KEY))
    merged = merge_partials([nothing, nothing])
    assert (merged.output == 0).all() and (merged.lse == NO_KEY).all()


def test_rows_of_nobody_are_left_out():
    share = Attended(torch.full((2, 1, 1), float("nan")), torch.zeros(2, 1))
    kept = only_rows(share, torch.tensor([False, True]))
    assert kept.output[0].item() == 0 and kept.output[1].isnan()
    assert kept.lse.flatten().tolist() == [NO_KEY, 0]


def test_each_rank_gets_the_merged_results_of_its_heads():
    query, key, value = drawn(0, 3, 4, 5), drawn(1, 9, 5), drawn(2, 9, 5)
    whole = share_of(query, key, value)

    def of_rank(group: Group) -> Attended:
        mine = slice(group.rank_in_group, None, 2)
        return merge_over_ranks(share_of(query, key[mine], value[mine]), group)

    for rank, merged in enumerate(on_ranks(2, of_rank)):
        heads = slice(2 * rank, 2 * rank + 2)
        torch.testing.assert_close(merged.output, whole.output[:, heads])
        torch.testing.assert_close(merged.lse, whole.lse[:, heads])


BLOCK_SIZE, HEADS, SIZE, RANKS = 4, 2, 8, 2


def metadata_of(state: AttentionState, lengths: list[tuple[int, int]], blocks: int) -> Any:
    """Requests of so many computed and scheduled tokens; each has blocks of its own."""
    computed, scheduled = np.array(lengths, np.int32).T
    starts = np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32)
    table = torch.arange(1, 1 + blocks * len(lengths), dtype=torch.int32).view(len(lengths), -1)
    seq_lens = (computed + scheduled).astype(np.int32)
    return AscendMetadata(
        attn_state=state,
        attn_mask=None,
        block_tables=table,
        slot_mapping=None,
        query_start_loc=torch.from_numpy(starts),
        query_start_loc_np=starts,
        seq_lens=torch.from_numpy(seq_lens),
        seq_lens_np=seq_lens,
        num_computed_tokens=torch.from_numpy(computed),
        num_reqs=len(lengths),
        max_query_len=int(scheduled.max()),
        max_seq_len=int(seq_lens.max()),
        num_actual_tokens=int(scheduled.sum()),
        num_input_tokens=int(scheduled.sum()),
    )


@pytest.mark.parametrize("interleave_size", [1, 4])
@pytest.mark.parametrize(
    ("state", "lengths"),
    [
        (AttentionState.DecodeOnly, [(0, 1), (3, 1), (20, 1)]),
        (AttentionState.ChunkedPrefill, [(9, 1), (5, 4), (0, 6), (1, 3), (16, 2)]),
    ],
)
def test_attention_over_shares_is_attention_over_the_whole(state, lengths, interleave_size):
    """Of requests with whole contexts, none, and parts on one rank alone."""
    blocks, kernels = 4, ReferenceKernels()
    metadata = metadata_of(state, lengths, blocks)
    total = metadata.num_actual_tokens
    query = drawn(0, total, RANKS * HEADS, SIZE)
    keys, values = (
        [drawn(seed + n, int(length), 1, SIZE) for n, length in enumerate(metadata.seq_lens_np)]
        for seed in (100, 200)
    )
    starts = metadata.query_start_loc_np.tolist()
    fresh = [
        torch.cat([each[computed:] for each, (computed, _) in zip(rows, lengths)])
        for rows in (keys, values)
    ]
    expected = torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(
                query[token].unsqueeze(1),
                keys[n][: computed + 1 + offset, 0].expand(RANKS * HEADS, -1, -1),
                values[n][: computed + 1 + offset, 0].expand(RANKS * HEADS, -1, -1),
                scale=0.5,
            )[None, :, 0]
            for n, (computed, scheduled) in enumerate(lengths)
            for offset, token in enumerate(range(starts[n], starts[n] + scheduled))
        ]
    )

    def of_rank(group: Group) -> torch.Tensor:
        dcp = DCPRank(RANKS, group.rank_in_group, interleave_size)
        cache = torch.full((2, 1 + blocks * len(lengths), BLOCK_SIZE, 1, SIZE), 1e4)
        lens = []
        for n, (computed, _) in enumerate(lengths):
            end = int(metadata.seq_lens_np[n])
            kept = [p for p in range(end) if dcp.owner(p) == dcp.rank]
            for place, position in enumerate(kept):
                block = int(metadata.block_tables[n, place // BLOCK_SIZE])
                cache[0, block, place % BLOCK_SIZE] = keys[n][position]
                cache[1, block, place % BLOCK_SIZE] = values[n][position]
            seen = end if state is AttentionState.DecodeOnly else computed
            lens.append(sum(position < seen for position in kept))
        lens_np = np.array(lens, np.int32)
        shared = rows_of(metadata, torch.from_numpy(lens_np), lens_np)
        if state is not AttentionState.DecodeOnly:
            longest = metadata.max_query_len
            mask = torch.ones(longest, longest, dtype=torch.bool).triu(1)
            shared = replace(shared, own=own_of(metadata, mask))
        heads = slice(group.rank_in_group * HEADS, (group.rank_in_group + 1) * HEADS)
        output = torch.empty(total, HEADS, SIZE)
        layer = LayerShape(HEADS, 1, SIZE, 0.5)
        given = query[:, heads].contiguous(), fresh, cache, shared, layer, output
        attend_dcp(kernels, *given, group=group)
        return output

    outputs = on_ranks(RANKS, of_rank)
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-4, atol=1e-5)


def test_a_dummy_run_without_decodes_has_rows_of_nobody():
    """As latent attention captures graphs of prefills alone."""
    metadata = metadata_of(AttentionState.DecodeOnly, [(3, 1)], 4)
    shared = rows_of(metadata, torch.zeros(0, dtype=torch.int32), np.zeros(0, np.int32))
    assert shared.rows.max_seq_len == 1 and shared.has_rows is None


def test_ranks_gather_as_many_latent_rows_as_the_device_counts():
    """The host sizes buffers and lists ends; the device finds rows by lengths of its own."""
    lens = [1, 7, 12, 0, 40]  # with runs of two on three ranks: rounds of six
    chunk = ContextChunk(
        tokens=slice(0, 5),
        query_ends=[1, 2, 3, 4, 5],
        kv_ends=np.cumsum(lens).tolist(),
        starts=torch.zeros(5, dtype=torch.int32),
        lens=torch.tensor(lens, dtype=torch.int32),
        block_tables=torch.zeros(5, 1, dtype=torch.int32),
    )
    prefills = Prefills(0, 5, [1, 2, 3, 4, 5], torch.arange(6), [0] * 5, (chunk,))
    shared = share_prefills(prefills, DCPRank(3, 0, 2)).chunks[0].ranks
    assert shared.local.lens.tolist() == [2, 4, 4, 0, 14]
    assert shared.local.kv_ends == [2, 6, 10, 10, 24]
    order = shared.order.tolist()
    assert len(set(order)) == sum(lens) and max(order) < 3 * 24
    assert order[1:8] == [2, 3, 26, 27, 50, 51, 4], "runs of two: one on each rank, then again"


def test_attention_over_shared_contexts_is_in_no_graph():
    config = SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=2))
    support = AscendMetadataBuilder.get_cudagraph_support(config, SimpleNamespace())
    assert support == AttentionCGSupport.NEVER
