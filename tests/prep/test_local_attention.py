"""Chunked local attention: virtual requests equal the scalar oracle's, whatever the batch."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.batches import LOCAL_GROUPS, RandomBatch, local_step, random_batches, step_batch
from vllm_npu_prep.prep.batch import PreparedStep, prepare_step
from vllm_npu_prep.prep.layout import StepLayout
from vllm_npu_prep.prep.local_attention import LocalGroups
from vllm_npu_prep.prep.mask import MaskForm, MaskKind, build_mask, plan_mask
from vllm_npu_prep.prep.oracle import OracleRequest, oracle_local_requests
from vllm_npu_prep.prep.padding import Padding
from vllm_npu_prep.prep.shape import EngineShape
from vllm_npu_prep.prep.state import AttentionState


def gathered(step: PreparedStep) -> np.ndarray:
    """Block tables of the virtual requests, as a device gathers them; ``[2, V, blocks]``."""
    tables = step.batch.tables
    chunks = tables.block_table_flat.reshape(-1, tables.shape.local.blocks_per_chunk)
    return chunks[step.arrays.chunk_local_table_rows]


@given(random_batches(), st.integers(1, 5))
def test_virtual_requests_equal_the_oracle(batch, blocks_per_chunk):
    step = local_step(batch, blocks_per_chunk)
    arrays, local = step.arrays, step.local
    expected = oracle_local_requests(
        batch.requests,
        attention_chunk_size=batch.block_size * blocks_per_chunk,
        block_size=batch.block_size,
    )
    count = len(expected["seq_lens"])
    assert local.num_reqs == count
    assert local.max_query_len == np.diff(expected["query_start_loc"]).max()
    assert local.max_seq_len == max(expected["seq_lens"])
    assert arrays.chunk_local_query_start_loc[: count + 1].tolist() == expected["query_start_loc"]
    for name in ("seq_lens", "num_computed_tokens"):
        assert getattr(arrays, f"chunk_local_{name}")[:count].tolist() == expected[name], name
    first, last = gathered(step)
    assert first[:count].tolist() == expected["block_table"]
    assert (last[:count] == first[:count] + 1000 * (first[:count] > 0)).all()
    # Padding
    query_lens = np.diff(arrays.chunk_local_query_start_loc)[count:]
    assert arrays.chunk_local_seq_lens[count:].tolist() == query_lens.tolist()
    assert (query_lens <= batch.block_size * blocks_per_chunk).all(), "more than a chunk"
    assert not arrays.chunk_local_num_computed_tokens[count:].any()
    assert not first[count:].any() and not last[count:].any(), "not the null block"
    starts = arrays.chunk_local_query_start_loc
    assert (np.diff(starts) >= 0).all()
    assert starts[-1] == step.num_input_tokens


@given(random_batches(), st.integers(1, 5))
def test_attention_over_virtual_requests_is_local(batch, blocks_per_chunk):
    """Also in the rows of a dense mask, whose columns are positions of a chunk."""
    step = local_step(batch, blocks_per_chunk)
    chunk_size, local = batch.block_size * blocks_per_chunk, step.local
    sizes = {"attention_chunk_size": chunk_size, "block_size": batch.block_size}
    visible = oracle_local_requests(batch.requests, **sizes)["visible"]
    plan = plan_mask(
        step.attn_state,
        MaskForm.DENSE,
        step.num_input_tokens,
        local.max_seq_len,
        attention_chunk_size=chunk_size,
    )
    mask = build_mask(plan, step.positions)
    starts, lengths = step.arrays.chunk_local_query_start_loc, step.arrays.chunk_local_seq_lens
    for req in range(local.num_reqs):
        for token in range(starts[req], starts[req + 1]):
            in_chunk = lengths[req] - (starts[req + 1] - token)  # by causality
            chunk_start = int(step.positions[token]) - in_chunk
            assert visible[token] == list(range(chunk_start, int(step.positions[token]) + 1))
            if mask is None:  # a decode, which sees all of its chunk
                assert in_chunk == lengths[req] - 1
                continue
            row = mask[in_chunk if plan.kind is MaskKind.MATRIX else token]
            assert np.flatnonzero(~row[: lengths[req]]).tolist() == list(range(in_chunk + 1))
    if step.attn_state is AttentionState.DecodeOnly:
        assert len(lengths) == len(step.arrays.seq_lens), "one for each request"
    if step.attn_state is AttentionState.PrefillNoCache:  # fresh K and V are all that is seen
        assert (np.diff(starts)[: local.num_reqs] == lengths[: local.num_reqs]).all()


def test_the_layout_has_places_for_all_virtual_requests():
    """The bound is what some batch has, over all batches of these sizes."""

    def most(query_len: int, chunk_size: int) -> int:
        """Chunks that so many tokens in a row can touch."""
        return max(
            len({position // chunk_size for position in range(start, start + query_len)})
            for start in range(chunk_size)
        )

    for num_tokens, num_reqs, chunk_size in itertools.product(range(1, 10), range(1, 5), (1, 2, 3)):
        batches = itertools.product(range(1, num_tokens + 1), repeat=min(num_reqs, num_tokens))
        real = max(
            sum(most(query_len, chunk_size) for query_len in batch)
            for batch in batches
            if sum(batch) == num_tokens
        )
        assert LocalGroups(chunk_size, 1, (0,)).max_reqs(num_tokens, num_reqs) == real


def test_an_engine_without_chunks_has_nothing_of_them():
    layout = StepLayout(16, 4, EngineShape(2))
    for name in ("query_start_loc", "seq_lens", "num_computed_tokens", "table_rows"):
        assert layout.arrays[f"chunk_local_{name}"].nbytes == 0


def test_rows_that_are_no_whole_chunks_are_refused():
    requests = step_batch([], block_size=4, max_model_len=16, extra_columns=1)
    with pytest.raises(ValueError, match="not whole chunks"):
        dataclasses.replace(requests.tables, shape=EngineShape(local=LocalGroups(8, 2, (0,))))


def test_more_virtual_requests_than_places_are_refused():
    """Such as those of a layout for larger chunks."""
    request = OracleRequest(0, 16, 16, range(16), range(1, 9))
    step = local_step(RandomBatch([request], 2, 32, None, None, True), 1)
    assert step.local.num_reqs == 8
    layout = StepLayout(16, 1, EngineShape(3, 4, local=LocalGroups(32, 1, LOCAL_GROUPS)))
    with pytest.raises(ValueError, match="more virtual requests"):
        prepare_step(step.batch, Padding(16, 1), layout)
