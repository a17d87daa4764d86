"""Property tests: the fused pass equals the scalar oracle in every key and keeps the invariants."""

import numpy as np
from hypothesis import given

from tests.helpers.batches import RandomBatch, random_batches
from tests.helpers.records import beside_oracle
from vllm_npu_prep.prep.mask import MaskForm, build_mask, compressed_mask, plan_mask
from vllm_npu_prep.prep.oracle import oracle_step
from vllm_npu_prep.records.contract import REQUEST_LEVEL, SCALARS, TOKEN_LEVEL, group_variables
from vllm_npu_prep.records.settings import LayerGroup

SPECULATIVE = (
    "target_logits_indices",
    "bonus_logits_indices",
    "cu_num_draft_tokens",
    "cu_num_sampled_tokens",
    "draft_token_ids",
    "backup_next_token_ids",
)
THE_CONSTANT = compressed_mask()


def mask_of(batch: RandomBatch, form: MaskForm) -> np.ndarray | None:
    step = batch.step()
    plan = plan_mask(
        step.attn_state,
        form,
        step.num_input_tokens,
        step.max_seq_len,
        sliding_window=batch.sliding_window,
    )
    return build_mask(plan, step.positions)


@given(random_batches())
def test_every_variable_equals_the_oracle(batch):
    step = batch.step()
    layers = LayerGroup(group=0, sliding_window=batch.sliding_window)
    names, difference = beside_oracle(step, batch.requests, layers)
    assert difference is None
    assert names >= {*TOKEN_LEVEL, *REQUEST_LEVEL, *SCALARS, *group_variables(step, 0)}
    assert names >= {f"{name}_padded" for name in SPECULATIVE}
    expected = oracle_step(batch.requests, **batch.settings())
    if batch.capture_sizes is not None:
        assert step.padding.num_reqs_padded == expected["num_reqs_padded"]
        assert step.padding.num_input_tokens == expected["num_input_tokens"]


@given(random_batches())
def test_dense_mask_equals_the_oracle(batch):
    expected = oracle_step(batch.requests, **batch.settings(), mask="dense")["attn_mask"]
    mask = mask_of(batch, MaskForm.DENSE)
    assert expected == (None if mask is None else mask.astype(int).tolist())


@given(random_batches())
def test_compressed_mask_is_the_constant_or_absent(batch):
    expected = oracle_step(batch.requests, **batch.settings(), mask="compressed")["attn_mask"]
    mask = mask_of(batch, MaskForm.COMPRESSED)
    if expected is None:
        assert mask is None
    else:
        assert np.array_equal(mask, THE_CONSTANT)


@given(random_batches())
def test_invariants_of_the_design_hold(batch):
    step = batch.step()
    arrays, total = step.arrays, step.total_num_scheduled_tokens
    starts = arrays.query_start_loc
    assert starts[0] == 0
    assert (np.diff(starts) >= 0).all()
    assert starts[step.num_reqs] == total
    if step.padding.num_reqs_padded > step.num_reqs:
        assert starts[-1] == step.num_input_tokens
    assert len(starts) - 1 == len(arrays.seq_lens) == step.padding.num_reqs_padded
    assert (step.seq_lens >= step.query_lens).all()
    slots = step.slot_mapping[0]
    assert len(set(slots.tolist())) == total
    assert (slots >= batch.block_size).all(), "a slot of the null block"
    for token, slot in enumerate(slots):
        owner = batch.requests[step.req_indices[token]]
        assert slot // batch.block_size in owner.block_ids
    assert (arrays.slot_mapping[0, total:] == -1).all()
    assert (arrays.input_ids[total:] == 0).all()
    assert (arrays.positions[total:] == 0).all()
    assert arrays.is_padding.tolist() == [token >= total for token in range(len(arrays.positions))]
    assert (arrays.input_ids >= 0).all(), "read where no token is"
    assert (arrays.positions < batch.max_model_len).all()


@given(random_batches())
def test_discard_mask_marks_requests_with_prompt_left(batch):
    step = batch.step()
    expected = [
        r.num_computed_tokens + r.num_scheduled_tokens < len(r.token_ids) for r in batch.requests
    ]
    assert step.arrays.discard_request_mask[: step.num_reqs].tolist() == expected
    assert step.arrays.discard_request_mask[step.num_reqs :].all()
