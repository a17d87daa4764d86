"""Prompts shared among ranks: upstream's chunks, and each token computed by exactly one rank."""

import dataclasses
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.worker.gpu.pcp_manager import PCPManager

from tests.helpers.batches import RandomBatch, decodes, random_batches, step_batch
from vllm_npu_prep.prep.batch import PreparedStep, prepare_step
from vllm_npu_prep.prep.checks import Rule, find_fault
from vllm_npu_prep.prep.dcp import DCPRank
from vllm_npu_prep.prep.layout import StepLayout, largest_step
from vllm_npu_prep.prep.oracle import OracleRequest, oracle_step
from vllm_npu_prep.prep.oracle_pcp import oracle_pcp_step
from vllm_npu_prep.prep.padding import GraphMode, Padding
from vllm_npu_prep.prep.pcp import PCPRank, gathered_places, largest_share
from vllm_npu_prep.prep.shape import EngineShape
from vllm_npu_prep.runner import preparer

LIMITS = np.array([1 << 31, 1 << 20], np.int64)


@st.composite
def shared_prompts(draw) -> tuple[RandomBatch, int, int]:
    """A batch without drafts, a number of ranks, and padding tokens of each rank."""
    batch = draw(random_batches().filter(lambda b: not any(r.num_draft_tokens for r in b.requests)))
    return batch, draw(st.integers(2, 4)), draw(st.integers(0, 3))


def rank_step(
    requests: list[OracleRequest],
    ranks: int,
    rank: int,
    extra: int = 0,
    *,
    block_size: int = 4,
    max_model_len: int = 300,
    mode: GraphMode = GraphMode.NONE,
) -> PreparedStep:
    """What one rank prepares, with so many padding tokens on the rank that has the most."""
    step = step_batch(requests, block_size, max_model_len)
    rows = len(step.tables.token_ids)
    owned = np.zeros((1, rows), np.int32)
    owned[0, : len(requests)] = [len(request.block_ids) for request in requests]
    step.tables = dataclasses.replace(
        step.tables,
        shape=EngineShape(pcp=PCPRank(ranks, rank, 2 * rows)),
        num_blocks=owned,
        num_synced_blocks=owned.copy(),
    )
    tokens, _ = largest_share(step.num_scheduled_tokens, ranks)
    query_len = int(mode is GraphMode.FULL)
    return prepare_step(step, Padding(ranks * (tokens + extra), step.num_reqs, query_len, mode))


def steps_of(given_ranks: tuple[RandomBatch, int, int]) -> list[PreparedStep]:
    batch, ranks, extra = given_ranks
    sizes = {"block_size": batch.block_size, "max_model_len": batch.max_model_len}
    return [rank_step(batch.requests, ranks, rank, extra, **sizes) for rank in range(ranks)]


@settings(max_examples=settings.default.max_examples // 3)
@given(shared_prompts())
def test_every_variable_equals_the_oracle(given_ranks):
    batch, ranks, _ = given_ranks
    sizes = {"block_size": batch.block_size, "max_model_len": batch.max_model_len}
    said = oracle_step(batch.requests, mask="compressed", **sizes)
    for rank, step in enumerate(steps_of(given_ranks)):
        sizes = {"rank_tokens": step.num_rank_tokens, "max_num_reqs": len(batch.requests) + 2}
        expected = oracle_pcp_step(said, ranks=ranks, rank=rank, **sizes)
        assert expected.pop("pcp_ranks") == step.computing_ranks().tolist()
        for name in ("num_tokens", "num_rows", "max_query_len", "max_seq_len", "num_samples"):
            assert getattr(step.pcp, name) == expected.pop(name), name
        for name, values in expected.items():
            is_padded = name not in ("pcp_logits_indices", "pcp_gathered_rows")
            got = getattr(step.arrays if is_padded else step, name)
            assert got.reshape(-1).tolist() == values, name
        assert find_fault(step, LIMITS) is None


@settings(max_examples=settings.default.max_examples // 3)
@given(shared_prompts())
def test_each_token_is_computed_by_one_rank(given_ranks):
    steps = steps_of(given_ranks)
    slots = steps[0].slot_mapping[0].tolist()
    computed = Counter[int]()
    for rank, step in enumerate(steps):
        first = rank * step.num_rank_tokens
        own = step.arrays.pcp_slot_mapping[0, first : first + step.pcp.num_tokens]
        computed.update(own.tolist())
        assert step.arrays.pcp_slot_mapping.tolist() == steps[0].arrays.pcp_slot_mapping.tolist()
        assert step.pcp_gathered_rows.tolist() == steps[0].pcp_gathered_rows.tolist()
    assert computed == Counter(slots)


@settings(max_examples=settings.default.max_examples // 6)
@given(shared_prompts())
def test_chunks_are_upstream_s(given_ranks):
    """But for prompts of which one token is left: upstream leaves them to the first rank."""
    batch, ranks, _ = given_ranks
    query_lens = np.array([r.num_scheduled_tokens for r in batch.requests])
    manager = PCPManager(ranks, 0, device="cpu", shard_decode_requests=True)
    owner = np.full(query_lens.sum(), -1)
    starts = np.cumsum(query_lens) - query_lens
    for rank in range(ranks):
        chunks = manager._iter_rank_chunks(rank, query_lens, query_lens > 1)
        for req, offset, length in chunks:
            owner[starts[req] + offset :][:length] = rank
    step = steps_of(given_ranks)[0]
    assert step.computing_ranks().tolist() == owner.tolist()
    dispatched = manager.get_num_tokens_for_dispatch(query_lens, query_lens > 1)
    assert largest_share(step.query_lens, ranks)[0] == dispatched


def prompt(num_computed: int, num_scheduled: int) -> OracleRequest:
    known = num_computed + num_scheduled
    blocks = [1 + block for block in range(-(-known // 4))]
    return OracleRequest(num_computed, num_scheduled, known, list(range(known)), blocks)


def test_rows_of_a_small_step():
    """Positions 3 to 12 in chunks of three: 3 4 5 | 6 7 8 | 9 10 11 | 12."""
    request = prompt(3, 10)
    first, second = (rank_step([request], 2, rank, 1) for rank in range(2))
    assert first.pcp_positions.tolist() == [3, 4, 5, 12]
    assert first.arrays.pcp_positions.tolist() == [3, 4, 5, 12, 0, 0, 0]
    assert second.pcp_positions.tolist() == [6, 7, 8, 9, 10, 11]
    assert first.pcp_query_start_loc.tolist() == [0, 3, 4]
    assert first.pcp_seq_lens.tolist() == [6, 13]
    assert second.pcp_seq_lens.tolist() == [9, 12]
    slots = [7, 8, 9, 16, -1, -1, -1, 10, 11, 12, 13, 14, 15, -1]
    assert second.arrays.pcp_slot_mapping.tolist() == [slots]
    assert first.pcp_logits_indices.tolist() == [3]
    assert second.pcp_logits_indices.tolist() == [0]
    assert (first.pcp_gathered_rows.tolist(), second.pcp_gathered_rows.tolist()) == ([0], [0])


def test_decodes_go_to_ranks_in_turn():
    steps = [rank_step(decodes(5), 2, rank, 1, mode=GraphMode.FULL) for rank in range(2)]
    assert [step.pcp_table_rows.tolist() for step in steps] == [[0, 2, 4], [1, 3]]
    assert steps[1].pcp_gathered_rows.tolist() == [0, 3, 1, 4, 2]
    starts = steps[1].arrays.pcp_query_start_loc
    assert starts.tolist() == [0, 1, 2, 3, 4]
    assert steps[1].arrays.pcp_seq_lens.tolist() == [6, 6, 1, 1]
    assert steps[1].arrays.pcp_table_rows[2:].tolist() == [len(steps[1].batch.tables.token_ids)] * 2


def test_samples_go_to_the_rank_that_computes_their_request():
    for rank in range(2):
        batch = rank_step(decodes(4), 2, rank).batch
        batch.previous_rows, batch.num_sampled_rows = np.array([2, 0, 3, -1]), 4
        batch.__post_init__()
        step = prepare_step(batch, Padding(4, 4))
        first = step.layout.offset_int32("pcp_input_ids")
        spare = first + 2
        expected = [[spare, spare, first, first + 1], [first, spare, spare, spare]]
        assert step.arrays.variable_int64[:4].tolist() == expected[rank]


@settings(max_examples=settings.default.max_examples // 6)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(2, 4))
def test_the_largest_buffer_holds_every_step(query_lens, ranks):
    counts, shape = np.array(query_lens, np.int32), EngineShape(pcp=PCPRank(ranks, 0, 16))
    tokens, rows = largest_share(counts, ranks)
    assert rows <= 2 * len(counts)
    nbytes = StepLayout(tokens * ranks, len(counts), shape).nbytes()
    assert nbytes <= largest_step(shape, int(counts.sum()), len(counts), 0)


@pytest.mark.parametrize("name", ["pcp_positions", "pcp_seq_lens", "pcp_gathered_rows"])
def test_other_engines_carry_nothing(name):
    step = step_batch(decodes(2), 4, 300)
    assert getattr(prepare_step(step, Padding(2, 2)).arrays, name).nbytes == 0


def test_places_of_a_mixed_batch():
    query_lens = np.array([1, 9, 1, 2], np.int32)
    places = gathered_places(query_lens, 2, 8)
    assert places.tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 4, 15]


FAULTS = {
    "pcp_positions": Rule.RANK_TOKENS,
    "pcp_input_ids": Rule.RANK_TOKENS,
    "pcp_slot_mapping": Rule.RANK_SLOTS,
    "pcp_seq_lens": Rule.RANK_ROWS,
    "pcp_num_computed_tokens": Rule.RANK_ROWS,
    "pcp_table_rows": Rule.RANK_ROWS,
    "pcp_gathered_rows": Rule.RANK_SAMPLES,
    "pcp_logits_indices": Rule.RANK_SAMPLES,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_value_breaks_its_rule(name):
    step = rank_step([prompt(4, 9), *decodes(2)], 2, 0)
    array = getattr(step.arrays, name)
    array[..., 0] += 1
    fault = find_fault(step, LIMITS)
    assert fault is not None and fault.rule == FAULTS[name]


@pytest.mark.parametrize("name", ["pcp_table_rows", "pcp_logits_indices"])
def test_rows_of_requests_alike_are_told_apart(name):
    """Requests 0 and 2 are at the same positions, but have other blocks and other samples."""
    step = rank_step(decodes(4), 2, 0)
    array = getattr(step.arrays, name)
    array[:2] = array[:2][::-1].copy()
    fault = find_fault(step, LIMITS)
    assert fault is not None and fault.rule == FAULTS[name]


def test_padding_that_sees_tokens_breaks_a_rule():
    step = rank_step(decodes(3), 2, 1, 1, mode=GraphMode.FULL)
    step.arrays.pcp_table_rows[-1] = 0
    fault = find_fault(step, LIMITS)
    assert fault is not None and fault.rule == Rule.RANK_PADDING


def test_tables_of_a_runner_know_its_ranks(monkeypatch):
    pcp, dcp, of = PCPRank(2, 1, 8), DCPRank(2, 1, 2), rank_step(decodes(2), 2, 1).batch.tables
    names = ("max_num_blocks", "block_sizes", "num_blocks", "num_synced_blocks")
    blocks = SimpleNamespace(
        block_table_flat_np=of.block_table_flat,
        num_device_blocks=of.num_device_blocks,
        **{name: getattr(of, name) for name in names},
    )
    config = SimpleNamespace(
        uniform_decode_query_len=1,
        parallel_config=None,
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
    )
    names = ("num_computed_tokens", "num_prompt_tokens", "num_tokens", "token_ids")
    of_requests = {name: getattr(of, name) for name in names}
    monkeypatch.setattr(preparer, "find_pcp", lambda vllm_config: pcp)
    monkeypatch.setattr(preparer, "find_dcp", lambda parallel_config: dcp)
    shape = preparer.make_tables(blocks, (), (), config, **of_requests).shape
    assert (shape.pcp, shape.dcp) == (pcp, dcp)


@pytest.mark.parametrize(("world", "rank", "rows"), [(2, 2, 4), (2, -1, 4), (2, 0, 0)])
def test_ranks_that_cannot_be_are_refused(world, rank, rows):
    with pytest.raises(ValueError, match="ranks count from 0"):
        PCPRank(world, rank, rows)
