"""States of linear attention are those of the oracle and of upstream.

What the check says of wrong ones: `tests/inspect/test_cheap_check.py`.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata, GDNAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from tests.helpers.batches import (
    STATE_GROUPS,
    RandomBatch,
    at_slots,
    drafts_step,
    random_batches,
    state_step,
)
from tests.prep.test_latent_split import sorted_batch
from vllm_npu_prep.prep.arrays import STEP_ARRAYS
from vllm_npu_prep.prep.batch import PreparedStep, prepare_step
from vllm_npu_prep.prep.checks import NO_SLOTS, find_fault
from vllm_npu_prep.prep.layout import StepLayout
from vllm_npu_prep.prep.oracle import OracleRequest, oracle_state_step
from vllm_npu_prep.prep.recurrent_states import RecurrentGroups
from vllm_npu_prep.prep.shape import EngineShape

LINES = ("initial_state_indices", "state_indices", "has_initial_state", "prefill_query_start_loc")
thresholds = st.integers(1, 4)


def without_drafts(batch: RandomBatch) -> RandomBatch:
    """The same requests, none of which verifies drafts."""
    requests = [
        dataclasses.replace(
            r, num_draft_tokens=0, token_ids=[*r.token_ids, *r.draft_token_ids], draft_token_ids=[]
        )
        for r in batch.requests
    ]
    return dataclasses.replace(batch, requests=requests)


@given(random_batches(), thresholds, st.booleans(), st.booleans())
def test_every_array_equals_the_oracle(batch, threshold, keeps_states, is_sorted):
    if is_sorted:
        batch = sorted_batch(batch, threshold)
    step = state_step(batch, threshold, keeps_states)
    size = batch.block_size if keeps_states else batch.max_model_len
    expected = oracle_state_step(batch.requests, decode_threshold=threshold, block_size=size)
    for name, value in dataclasses.asdict(step.states).items():
        assert value == expected[name], name
    assert step.prefill_query_start_loc.tolist() == expected["prefill_query_start_loc"]
    assert step.has_initial_state.tolist() == expected["has_initial_state"]
    for name in ("initial_state_indices", "state_indices"):
        first, last = getattr(step, name).tolist()
        assert first == expected[name], name
        assert last == [block + 1000 if block else 0 for block in expected[name]], name
    padding = slice(step.num_reqs, None)
    assert not step.arrays.has_initial_state[padding].any()
    assert not step.arrays.state_indices[:, padding].any()
    assert not step.arrays.initial_state_indices[:, padding].any()
    for group in STATE_GROUPS:
        assert (step.arrays.slot_mapping[group] == -1).all(), "layers with states write no slots"
    assert (step.slot_mapping[1] >= 0).all()


@given(random_batches(), thresholds, st.booleans())
def test_slots_of_attention_are_as_without_states(batch, threshold, keeps_states):
    assert (
        state_step(batch, threshold, keeps_states).slot_mapping[1].tolist()
        == batch.step().slot_mapping[0].tolist()
    )


@settings(max_examples=settings.default.max_examples // 3)
@given(random_batches(), thresholds, st.booleans(), st.randoms(use_true_random=False))
def test_states_are_the_same_wherever_requests_are(batch, threshold, keeps_states, random):
    batch = sorted_batch(batch, threshold)
    step = state_step(batch, threshold, keeps_states)
    slots = list(range(len(step.batch.tables.token_ids)))
    random.shuffle(slots)
    moved = prepare_step(at_slots(step.batch, slots[: step.num_reqs]), step.padding, step.layout)
    assert moved.states == step.states
    for name in LINES:
        assert np.array_equal(getattr(moved.arrays, name), getattr(step.arrays, name)), name
    limits = np.array([2**30, NO_SLOTS, 2**30, NO_SLOTS])
    for each in (step, moved):
        each.batch.tables.num_blocks[:] = each.batch.tables.max_num_blocks[:, None]
        assert find_fault(each, limits) is None


def upstream_builder(
    batch: RandomBatch, keeps_states: bool, num_drafts: int = 0
) -> GDNAttentionMetadataBuilder:
    """Upstream's builder, without the parts that ask for CUDA."""
    builder = object.__new__(GDNAttentionMetadataBuilder)
    mode = "align" if keeps_states else "none"
    builder.kv_cache_spec = MambaSpec(  # type: ignore[misc]
        batch.block_size if keeps_states else batch.max_model_len, ((1,),), (torch.float32,)
    )
    builder.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode=mode))
    builder.use_spec_decode, builder.num_spec = num_drafts > 0, num_drafts
    builder.use_full_cuda_graph = False
    builder.decode_cudagraph_max_bs, builder.gdn_prefill_backend = 0, "triton"
    builder.checkpoint_builder = SimpleNamespace(build=lambda *given: None)
    builder._build_chunk_metadata = lambda *given: (None, None)  # indices of Triton's blocks
    return builder


def upstream_metadata(
    batch: RandomBatch,
    step: PreparedStep,
    keeps_states: bool,
    num_drafts: int = 0,
    *of_drafts: torch.Tensor,
) -> GDNAttentionMetadata:
    """What upstream's builder makes of the step."""
    starts = torch.from_numpy(step.query_start_loc.copy())
    lengths = torch.from_numpy(step.seq_lens.copy())
    prompts = torch.tensor([request.num_prompt_tokens for request in batch.requests])
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=step.num_reqs,
        num_actual_tokens=step.total_num_scheduled_tokens,
        max_query_len=step.max_query_len,
        max_seq_len=step.max_seq_len,
        block_table_tensor=torch.from_numpy(
            step.batch.tables.block_table(0)[: step.num_reqs].copy()
        ),
        slot_mapping=torch.zeros(step.total_num_scheduled_tokens, dtype=torch.int32),
        seq_lens_cpu_upper_bound=lengths,
        is_prefilling=torch.from_numpy(step.num_computed_tokens.copy()) < prompts,
    )
    return upstream_builder(batch, keeps_states, num_drafts).build(0, common, *of_drafts)


@settings(max_examples=settings.default.max_examples // 3)
@given(random_batches(), st.booleans())
def test_every_array_equals_upstream_s(batch, keeps_states):
    """`GDNAttentionMetadataBuilder`, array by array, for a batch in upstream's order.

    First chunks of one token are prefills there, and decodes here; the arrays of requests are the
    same for both.
    """
    batch = sorted_batch(without_drafts(batch), 1)
    step = state_step(batch, 1, keeps_states)
    theirs, ours = upstream_metadata(batch, step, keeps_states), step.states
    assert ours is not None
    assert theirs.non_spec_state_indices_tensor.tolist() == step.state_indices[0].tolist()
    assert theirs.non_spec_query_start_loc.tolist() == step.query_start_loc.tolist()
    assert theirs.num_actual_tokens == step.total_num_scheduled_tokens
    begins = [r.num_computed_tokens == 0 and r.num_scheduled_tokens == 1 for r in batch.requests]
    if theirs.has_initial_state is not None:
        assert theirs.has_initial_state.tolist() == step.has_initial_state.tolist()
    more = ours.num_decodes - theirs.num_decodes  # requests that upstream counts as prefills
    assert all(begins[theirs.num_decodes : ours.num_decodes])
    assert ours.num_decode_tokens == theirs.num_decode_tokens + more
    assert ours.num_prefills == theirs.num_prefills - more
    if not theirs.num_prefills:
        return
    starts = theirs.prefill_query_start_loc[more:] - theirs.prefill_query_start_loc[more]
    assert starts.tolist() == step.prefill_query_start_loc.tolist()
    assert (
        theirs.prefill_state_indices[more:].tolist()
        == step.state_indices[0, ours.num_decodes :].tolist()
    )


MAX_MODEL_LEN = 60


@st.composite
def requests_with_drafts(draw) -> tuple[list[OracleRequest], int]:
    """Decodes with drafts, first chunks and later ones, decodes first; and the most drafts."""
    num_drafts = draw(st.integers(1, 4))
    requests = []
    for index, seed in enumerate(draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9))):
        rng = np.random.default_rng(seed)
        kind, drafts = rng.choice(["verifies", "chunk", "begins"]), 0
        computed = 0 if kind == "begins" else int(rng.integers(1, 30))
        scheduled = int(rng.integers(1, 20))
        prompt = computed + scheduled + int(rng.integers(0, 5))
        if kind == "verifies":
            drafts, prompt = (
                int(rng.integers(0, num_drafts + 1)),
                int(rng.integers(1, computed + 1)),
            )
            scheduled = 1 + drafts
        ids = rng.integers(4, 100, max(prompt, computed + scheduled)).tolist()
        known = computed + scheduled - drafts
        blocks = 1 + index * 8 + rng.permutation(8)[: num_drafts + 1]
        requests.append(
            OracleRequest(
                num_computed_tokens=computed,
                num_scheduled_tokens=scheduled,
                num_prompt_tokens=prompt,
                token_ids=ids[: max(prompt, known)] if not drafts else ids[:known],
                block_ids=blocks.tolist(),
                num_draft_tokens=drafts,
                draft_token_ids=ids[known : known + drafts],
                num_accepted_tokens=int(rng.integers(1, min(num_drafts + 1, max(computed, 1)) + 1)),
            )
        )
    requests.sort(key=lambda r: (r.num_scheduled_tokens > 1 + num_drafts, not _verifies(r)))
    return requests, num_drafts


def _verifies(request: OracleRequest) -> bool:
    return request.num_computed_tokens >= request.num_prompt_tokens


@given(requests_with_drafts())
def test_every_array_with_drafts_equals_the_oracle(given_batch):
    requests, num_drafts = given_batch
    step = drafts_step(requests, MAX_MODEL_LEN, num_drafts)
    expected = oracle_state_step(
        requests, decode_threshold=1 + num_drafts, block_size=MAX_MODEL_LEN, num_drafts=num_drafts
    )
    for name, value in dataclasses.asdict(step.states).items():
        assert value == expected[name], name
    assert step.has_initial_state.tolist() == expected["has_initial_state"]
    assert step.num_accepted_tokens.tolist() == expected["num_accepted_tokens"]
    for name in ("initial_state_indices", "state_indices", "token_state_indices"):
        first, last = getattr(step, name).tolist()
        assert first == expected[name], name
        assert last == [block + 1000 if block else 0 for block in expected[name]], name
    arrays, reqs, tokens = step.arrays, step.num_reqs, step.total_num_scheduled_tokens
    assert not arrays.token_state_indices[:, tokens:].any()
    assert (arrays.num_accepted_tokens[reqs:] == 1).all()
    step.batch.tables.num_blocks[:] = 1 + num_drafts
    step.batch.tables.num_blocks[1] = MAX_MODEL_LEN
    limits = np.array([100, NO_SLOTS, 1 << 20, NO_SLOTS], np.int64)
    assert find_fault(step, limits) is None


@given(requests_with_drafts(), st.sampled_from([5, 6, 16]))
def test_with_the_prefix_cache_states_end_with_blocks(given_batch, size):
    """Every array is the oracle's; the state at a block's end is in it, and the next step reads it.

    A step writes no block that holds the end of an earlier one.
    """
    requests, num_drafts = given_batch
    requests = [
        dataclasses.replace(r, block_ids=[100 * (1 + row) + n for n in range(60 // size + 8)])
        for row, r in enumerate(requests)
    ]
    step = drafts_step(requests, MAX_MODEL_LEN, num_drafts, size)
    kinds = {"decode_threshold": 1 + num_drafts, "block_size": size, "num_drafts": num_drafts}
    expected = oracle_state_step(requests, **kinds)
    for name in ("initial_state_indices", "state_indices", "token_state_indices"):
        assert getattr(step, name)[0].tolist() == expected[name], name
    for row, request in enumerate(requests):
        start, stop = step.query_start_loc[row : row + 2].tolist()
        computed = request.num_computed_tokens
        written = {computed + stop - start: int(step.state_indices[0, row])}
        if row < step.states.num_decodes:
            of_tokens = step.token_state_indices[0, start:stop].tolist()
            written = dict(enumerate(of_tokens, computed + 1))
        assert len({*written.values()}) == len(written)
        for after, block in written.items():
            place = request.block_ids.index(block)
            assert place >= computed // size, "what is behind it may be another request's, too"
            assert after % size or place == after // size - 1
            accepted = after - computed if row < step.states.num_decodes else 1
            following = dataclasses.replace(
                request,
                num_computed_tokens=after,
                num_scheduled_tokens=1,
                num_draft_tokens=0,
                draft_token_ids=[],
                token_ids=list(range(after + 1)),
                num_accepted_tokens=accepted,
            )
            then = drafts_step([following], MAX_MODEL_LEN, num_drafts, size)
            assert then.initial_state_indices[0, 0] == block


@settings(max_examples=settings.default.max_examples // 3)
@given(requests_with_drafts())
def test_every_array_with_drafts_equals_upstream_s(given_batch):
    """Which blocks drafts write, which state is read, and which tokens are of which half.

    Upstream's other half has chunks of prompts that are as short as decodes: they keep one state
    there, and one for each token here. Its first one is the same.
    """
    requests, num_drafts = given_batch
    step = drafts_step(requests, MAX_MODEL_LEN, num_drafts)
    batch = RandomBatch(requests, MAX_MODEL_LEN, MAX_MODEL_LEN, None, None, True)
    verifying = torch.tensor([_verifies(r) for r in requests])
    drafts = torch.tensor([r.num_draft_tokens for r in requests], dtype=torch.int32)
    accepted = torch.from_numpy(step.num_accepted_tokens.copy())
    theirs = upstream_metadata(
        batch, step, False, num_drafts, accepted, drafts.masked_fill(~verifying, -1)
    )
    assert theirs.num_spec_decodes == int(verifying.sum())
    states, starts = torch.from_numpy(step.state_indices[0].copy()), step.query_start_loc.tolist()
    others = (~verifying).nonzero().flatten().tolist()
    if not verifying.any():
        assert theirs.non_spec_state_indices_tensor.tolist() == states.tolist()
        return
    assert theirs.num_accepted_tokens.tolist() == accepted[verifying].tolist()
    tokens = [list(range(starts[row], starts[row + 1])) for row in range(len(requests))]
    rows = verifying.nonzero().flatten().tolist()
    for place, row in enumerate(rows):
        blocks = theirs.spec_state_indices_tensor[place].tolist()
        written = step.token_state_indices[0, starts[row] : starts[row + 1]].tolist()
        assert written == blocks[: len(written)]
        assert step.initial_state_indices[0, row] == blocks[int(accepted[row]) - 1]
    assert theirs.spec_token_indx.tolist() == [t for row in rows for t in tokens[row]]
    assert theirs.non_spec_token_indx.tolist() == [t for row in others for t in tokens[row]]
    lens = [len(tokens[row]) for row in rows]
    assert theirs.spec_query_start_loc.tolist() == [0, *np.cumsum(lens).tolist()]
    if others:
        assert theirs.non_spec_state_indices_tensor.tolist() == states[others].tolist()
        assert theirs.has_initial_state.tolist() == step.has_initial_state[others].tolist()


def test_an_engine_without_states_has_none_of_their_arrays():
    layout = StepLayout(64, 8, EngineShape(2))
    assert all(layout.arrays[name].nbytes == 0 for name in LINES)
    sizes = StepLayout(64, 8, EngineShape(3, states=RecurrentGroups((0, 2)))).arrays
    assert sizes["state_indices"].shape == sizes["initial_state_indices"].shape == (2, 8)
    assert (sizes["has_initial_state"].shape, sizes["prefill_query_start_loc"].shape) == (
        (8,),
        (9,),
    )
    assert [STEP_ARRAYS[name].padding for name in LINES[:3]] == [0, 0, False]


@pytest.mark.parametrize(
    ("sizes", "message"), [((0,), "at least one"), ((2, 3), "decodes of 2 tokens")]
)
def test_sizes_that_make_no_sense_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        RecurrentGroups((0,), *sizes)


def request(computed: int, scheduled: int, blocks: list[int], drafts: int = 0) -> OracleRequest:
    return OracleRequest(
        num_computed_tokens=computed,
        num_scheduled_tokens=scheduled,
        num_prompt_tokens=4,
        token_ids=list(range(2, 2 + max(computed + scheduled, 4) - drafts)),
        block_ids=blocks,
        num_draft_tokens=drafts,
        draft_token_ids=[9] * drafts,
        num_accepted_tokens=1,
    )


def test_a_step_that_can_not_be_is_refused():
    decode = request(7, 2, [3, 5], drafts=1)
    with pytest.raises(ValueError, match="more accepted tokens"):
        drafts_step([dataclasses.replace(decode, num_accepted_tokens=3)], MAX_MODEL_LEN, 1)
    with pytest.raises(ValueError, match="drafts of a request after the decodes"):
        drafts_step([request(0, 9, [3, 5]), decode], MAX_MODEL_LEN, 1)
