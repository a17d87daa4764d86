"""What of requests is left to upstream or refused; the rest: test_request_updates.py."""

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


def update(output, batch, requests, prompt_logprobs=(), **options):
    return RequestUpdates(4, MAX_MODEL_LEN, **options).update_plain_requests(
        output, batch, requests, dict.fromkeys(prompt_logprobs, 1)
    )


def requests_of(names: str) -> dict[str, SimpleNamespace]:
    return {name: SimpleNamespace(block_ids=([1],), prev_num_draft_len=0) for name in names}


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
    for options, wanted in (({}, ""), ({"request_states_are_read": True}, ""), ({}, "a")):
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


@pytest.mark.parametrize(("samples", "length"), [([[5], [6]], 8), ([[5, 6], [7, 8]], 7)])
def test_a_request_without_room_for_its_tokens_is_named(samples, length):
    batch = batch_of("ab", [4, length])
    batch.vocab_size = 100
    sampled, on_host = torch.tensor(samples, dtype=torch.int32), np.zeros((4, 1), np.int64)

    def read_back(sampled: torch.Tensor) -> list[list[int]]:
        on_host[: len(sampled)] = sampled.numpy()
        return sampled.tolist()

    books = Bookkeeping(
        4, MAX_MODEL_LEN, asynchronous=False, read_back=read_back, samples_np=on_host
    )
    output = SimpleNamespace(sampled_token_ids=sampled, logprobs_tensors=None)
    with pytest.raises(AssertionError, match=r"request b has no room .* max_model_len=8 tokens"):
        books.append_sampled_tokens(batch, output, np.zeros(2, bool))
