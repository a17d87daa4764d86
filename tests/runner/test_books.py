"""What requests and samples are left to upstream or refused; the rest: test_request_updates.py."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.stepping import new_request, scheduler_output
from vllm_npu_prep.runner.v1.bookkeeping import Bookkeeping
from vllm_npu_prep.runner.v1.request_updates import RequestUpdates

MAX_MODEL_LEN = 8


def batch_of(names: str, num_tokens: list[int], num_prompt_tokens: int = 2) -> SimpleNamespace:
    """As much of upstream's batch as books need: each request has one output token or more."""
    rows, outputs = len(names), [[7] * (n - num_prompt_tokens) for n in num_tokens]
    return SimpleNamespace(
        num_reqs=rows,
        req_ids=list(names),
        req_id_to_index={name: row for row, name in enumerate(names)},
        req_output_token_ids=outputs,
        num_tokens_no_spec=np.array(num_tokens, np.int32),
        num_prompt_tokens=np.full(rows, num_prompt_tokens, np.int32),
        num_computed_tokens_cpu=np.array(num_tokens, np.int32) - 1,
        token_ids_cpu=np.zeros((rows, MAX_MODEL_LEN), np.int32),
        is_token_ids=np.zeros((rows, MAX_MODEL_LEN), bool),
        block_table=SimpleNamespace(append_row=lambda *args: None),
        spec_token_ids=[[] for _ in names],
        generators={},
        prev_sampled_token_ids=None,
        prev_req_id_to_index=None,
    )


def bookkeeping(asynchronous: bool = False) -> Bookkeeping:
    samples = np.zeros((4, 1), np.int64)

    def read_back(sampled: torch.Tensor) -> list[list[int]]:
        samples[: len(sampled)] = sampled.numpy()
        return sampled.tolist()

    return Bookkeeping(
        4,
        MAX_MODEL_LEN,
        asynchronous=asynchronous,
        read_back=read_back,
        samples_np=samples,
    )


def update(output, batch, requests, prompt_logprobs=(), **options):
    return RequestUpdates(4, MAX_MODEL_LEN, **options).update_plain_requests(
        output, batch, requests, dict.fromkeys(prompt_logprobs, 1)
    )


def requests_of(names: str) -> dict[str, SimpleNamespace]:
    return {name: SimpleNamespace(block_ids=([1],), prev_num_draft_len=0) for name in names}


def sampled(*tokens: int) -> SimpleNamespace:
    ids = torch.tensor(tokens, dtype=torch.int32).unsqueeze(1)
    return SimpleNamespace(sampled_token_ids=ids, logprobs_tensors=None)


@pytest.mark.parametrize(
    "change",
    [
        {"finished_req_ids": {"z"}},
        {"free_encoder_mm_hashes": ["h"]},
        {"new_block_ids_to_zero": [3]},
        {"kv_cache_block_copies": [object()]},
        {"scheduled_new_reqs": [new_request("c", [1], [5])]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_else_the_scheduler_says_is_upstreams(change):
    output = scheduler_output({"a": 1, "b": 1}, cached={"a": ([], 4, 2), "b": ([], 4, 2)})
    vars(output).update(change)
    left, _ = update(output, batch_of("ab", [4, 4]), requests_of("ab"))
    assert left.scheduled_cached_reqs.req_ids == []
    assert {name: getattr(left, name) for name in change} == change


def test_states_are_followed_where_something_reads_them():
    output = scheduler_output({"a": 1}, cached={"a": ([], 4, 2)})
    for options, wanted in (({}, ""), ({"states_are_read": True}, ""), ({}, "a")):
        requests = requests_of("a")
        requests["a"].num_computed_tokens = 3
        update(output, batch_of("a", [4]), requests, wanted, **options)
        followed = 4 if options or wanted else 3
        assert requests["a"].num_computed_tokens == followed


def test_tokens_that_the_scheduler_sends_are_upstreams():
    output = scheduler_output({"a": 1}, cached={"a": ([], 4, 2)})
    batch = batch_of("a", [4])
    assert update(output, batch, requests_of("a"), tokens_are_sent=True) == (output, None)
    assert batch.num_computed_tokens_cpu.tolist() == [3]


def test_drafts_past_the_longest_sequence_are_refused_by_name():
    output = scheduler_output({"a": 1, "b": 3}, cached={"a": ([], 4, 2), "b": ([], 7, 5)})
    output.scheduled_spec_decode_tokens = {"b": [8, 9]}
    requests = requests_of("ab")
    with pytest.raises(AssertionError, match="request b got 2 drafts past max_model_len=8"):
        update(output, batch_of("ab", [4, 7]), requests, num_spec_tokens=2)


@pytest.mark.parametrize(
    "change",
    [
        {"generators": {0: None}, "discard": True},
        {"num_reqs": 3},
        {"prompt_logprobs": {"a": 1}},
        {"samples": [[5, 6], [7, -1]], "logprobs": True},
    ],
)
def test_samples_that_need_more_are_upstreams(change):
    batch, wanted = batch_of("ab", [4, 4]), change.get("prompt_logprobs", {})
    batch.generators = change.get("generators", {})
    batch.num_reqs = change.get("num_reqs", 2)
    samples = SimpleNamespace(
        sampled_token_ids=torch.tensor(change.get("samples", [[5], [6]]), dtype=torch.int32),
        logprobs_tensors=change.get("logprobs"),
    )
    discard = np.array([change.get("discard", False), False])
    assert not bookkeeping().can_append_together(batch, samples, discard, wanted)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_plain_samples_are_appended_together(asynchronous):
    batch, none = batch_of("ab", [4, 4]), np.zeros(2, bool)
    batch.generators = {1: None}
    books = bookkeeping(asynchronous)
    assert books.can_append_together(batch, sampled(5, 6), none, {})
    drafted = SimpleNamespace(
        sampled_token_ids=torch.tensor([[5, 6], [7, -1]], dtype=torch.int32), logprobs_tensors=None
    )
    # Asynchronous: the drafter says which samples the next step continues from
    assert books.can_append_together(batch, drafted, none, {}) is not asynchronous
    batch.prev_sampled_token_ids = drafted.sampled_token_ids[:, :1]
    assert books.can_append_together(batch, drafted, none, {})


def test_rejected_and_discarded_drafts_are_not_appended():
    batch = batch_of("abc", [3, 4, 3])
    batch.vocab_size = 100
    samples = torch.tensor([[5, 6, -1], [7, 8, 9], [4, 100, -1]], dtype=torch.int32)
    *_, tokens, _, _, _, invalid = bookkeeping().append_sampled_tokens(
        batch,
        SimpleNamespace(sampled_token_ids=samples, logprobs_tensors=None),
        np.array([False, True, False]),
    )
    assert tokens == [[5, 6], [], [4]] and invalid == []
    assert batch.req_output_token_ids == [[7, 5, 6], [7, 7], [7, 4]]
    assert batch.num_tokens_no_spec.tolist() == [5, 4, 4]
    assert batch.token_ids_cpu[:, 3:5].tolist() == [[5, 6], [0, 0], [4, 0]]
    assert batch.is_token_ids.sum(1).tolist() == [2, 0, 1]


def test_sampled_tokens_are_appended_but_for_discarded_ones():
    batch = batch_of("ab", [3, 4])
    *_, tokens, _, req_ids, rows, invalid = bookkeeping().append_sampled_tokens(
        batch, sampled(5, 6), np.array([False, True])
    )
    assert tokens == [[5], []] and invalid == []
    assert req_ids == ["a", "b"] and rows == {"a": 0, "b": 1}
    assert batch.req_output_token_ids == [[7, 5], [7, 7]]
    assert batch.num_tokens_no_spec.tolist() == [4, 4]
    assert batch.token_ids_cpu[0, 3] == 5 and batch.is_token_ids[0, 3]
    assert not batch.is_token_ids[1].any()


@pytest.mark.parametrize(("samples", "length"), [([[5], [6]], 8), ([[5, 6], [7, 8]], 7)])
def test_a_request_without_room_for_its_tokens_is_named(samples, length):
    batch = batch_of("ab", [4, length])
    batch.vocab_size = 100
    output = SimpleNamespace(
        sampled_token_ids=torch.tensor(samples, dtype=torch.int32), logprobs_tensors=None
    )
    with pytest.raises(AssertionError, match=r"request b has no room .* max_model_len=8 tokens"):
        bookkeeping().append_sampled_tokens(batch, output, np.zeros(2, bool))
