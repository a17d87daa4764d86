"""M-RoPE positions of a step against the scalar oracle, and in its layout."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.batches import RandomBatch, random_batches
from vllm_npu_prep.prep.batch import prepare_step
from vllm_npu_prep.prep.layout import StepLayout
from vllm_npu_prep.prep.mrope import MropeTables
from vllm_npu_prep.prep.oracle import OracleRequest, oracle_step
from vllm_npu_prep.prep.shape import EngineShape


def with_images(batch: RandomBatch, seed: int, num_dims: int) -> list[OracleRequest]:
    """Positions that no rule would give, for some of the prompts; deltas of either sign."""
    rng = np.random.default_rng(seed)
    requests = []
    for request in batch.requests:
        if rng.random() < 0.4:
            requests.append(request)
            continue
        positions = rng.integers(0, 99, (num_dims, request.num_prompt_tokens)).tolist()
        delta = int(rng.integers(-5, 6))
        requests.append(replace(request, mrope_positions=positions, mrope_position_delta=delta))
    return requests


def tables_of(requests: list[OracleRequest], num_dims: int, strided: bool = False) -> MropeTables:
    tables = MropeTables(num_dims, len(requests) + 2)
    rows = []
    for request in requests:
        positions = np.array(request.mrope_positions, np.int64) if request.mrope_positions else None
        if positions is not None and strided:  # as a view of another memory order
            positions = np.asfortranarray(positions)
        rows.append((positions, request.mrope_position_delta))
    tables.set_rows(rows)
    return tables


@given(random_batches(), st.integers(0, 2**31), st.sampled_from([3, 4]), st.booleans())
def test_positions_equal_the_oracle(batch, seed, num_dims, strided):
    requests = with_images(batch, seed, num_dims)
    plain = batch.step()
    shape = EngineShape(max_logits_per_req=4, mrope_dims=num_dims)
    mrope = tables_of(requests, num_dims, strided)
    tables = replace(plain.batch.tables, shape=shape, mrope=mrope)
    layout = StepLayout(plain.num_input_tokens, plain.padding.num_reqs_padded, shape)
    buffer = np.full(layout.variable_offset + 64, 0x7F, np.uint8)  # what was there before
    step = prepare_step(
        replace(plain.batch, tables=tables), plain.padding, layout, layout.views(buffer)
    )
    expected = oracle_step(requests, **batch.settings(), speculation=True, mrope_dims=num_dims)
    assert step.mrope_positions.tolist() == expected["mrope_positions"]
    assert step.positions.tolist() == expected["positions"], "those of the sequence stay"
    padding = step.arrays.mrope_positions[:, step.total_num_scheduled_tokens :]
    assert (padding == 0).all()


def test_tokens_alone_decide_where_they_are_in_the_buffer():
    few = StepLayout(16, 2, EngineShape(mrope_dims=3))
    many = StepLayout(16, 9, EngineShape(3, mrope_dims=3))
    assert few.arrays["mrope_positions"] == many.arrays["mrope_positions"]
    spec = few.arrays["mrope_positions"]
    assert spec.shape == (3, 16) and spec.dtype == np.int64 and spec.end <= few.nbytes()
    views = few.views(np.zeros(few.nbytes() // 64 * 64 + 64, np.uint8))
    assert views.mrope_positions.flags.c_contiguous
    assert StepLayout(16, 2).arrays["mrope_positions"].nbytes == 0


def test_rows_that_get_other_requests_forget_the_old_ones():
    """A freed prompt is never read: its address goes with it."""
    image = np.arange(24, dtype=np.int64).reshape(3, 8)
    tables = MropeTables(3, 2)
    tables.set_rows([(image, 5), (None, 0)])
    tables.set_rows([(None, 0), (image, 5)])
    layout = StepLayout(4, 2, EngineShape(mrope_dims=3))
    arrays = layout.views(np.zeros(layout.variable_offset + 64, np.uint8))
    arrays.query_start_loc[:] = 0, 2, 4
    arrays.num_computed_tokens[:] = 0, 7
    tables.fill(2, arrays)
    assert arrays.mrope_positions.tolist() == [[0, 1, 7, 13], [0, 1, 15, 13], [0, 1, 23, 13]]
