"""Plain requests brought up to date and their samples appended, without an engine.

`test_bookkeeping.py` does the same beside upstream's runner.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.stepping import new_request, scheduler_output
from vllm_npu_prep.runner.bookkeeping import PLACEHOLDER, Bookkeeping

MAX_MODEL_LEN = 8


class Blocks:
    """Notes what is appended."""

    def __init__(self) -> None:
        self.appended = []

    def append_row(self, block_ids, row) -> None:
        self.appended.append((int(row), block_ids))


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
        block_table=Blocks(),
        generators={},
        prev_sampled_token_ids=None,
        prev_req_id_to_index=None,
    )


def bookkeeping(asynchronous: bool = False, requests_are_read: bool = False) -> Bookkeeping:
    samples = np.zeros((4, 1), np.int64)

    def read_back(sampled: torch.Tensor) -> list[list[int]]:
        samples[: len(sampled)] = sampled.numpy()
        return sampled.tolist()

    return Bookkeeping(
        4,
        MAX_MODEL_LEN,
        asynchronous=asynchronous,
        requests_are_read=requests_are_read,
        read_back=read_back,
        samples_np=samples,
    )


def requests_of(names: str) -> dict[str, SimpleNamespace]:
    return {name: SimpleNamespace(block_ids=([1],)) for name in names}


def sampled(*tokens: int) -> SimpleNamespace:
    ids = torch.tensor(tokens, dtype=torch.int32).unsqueeze(1)
    return SimpleNamespace(sampled_token_ids=ids, logprobs_tensors=None)


def test_plain_requests_advance_and_upstream_is_left_the_others():
    batch, requests = batch_of("abc", [4, 4, 4]), requests_of("abcd")
    cached = {
        "a": ([2], 4, 2),
        "b": ([], 3, 1),  # the scheduler went back: an output token was lost
        "c": ([], 4, 2),
        "d": ([3], 5, 3),  # is not in the batch
    }
    output = scheduler_output(dict.fromkeys("abcd", 1), cached=cached)
    left = bookkeeping().update_plain_requests(output, batch, requests)
    assert batch.num_computed_tokens_cpu.tolist() == [4, 3, 4]
    assert requests["a"].block_ids == ([1, 2],)
    assert batch.block_table.appended == [(0, ([2],))]
    rest = left.scheduled_cached_reqs
    assert rest.req_ids == ["b", "d"]
    assert rest.num_computed_tokens == [3, 5]
    assert rest.new_block_ids == [None, ([3],)]
    assert output.scheduled_cached_reqs.req_ids == list("abcd"), "the scheduler's own stays"


def test_a_request_that_was_taken_back_is_left_to_upstream():
    batch = batch_of("ab", [4, 4])
    output = scheduler_output({"a": 1, "b": 1}, cached={"a": ([2], 0, 2), "b": ([], 4, 2)})
    output.scheduled_cached_reqs.resumed_req_ids = {"a"}
    left = bookkeeping().update_plain_requests(output, batch, requests_of("ab"))
    assert left.scheduled_cached_reqs.req_ids == ["a"]
    assert batch.num_computed_tokens_cpu.tolist() == [3, 4]


def test_new_requests_are_upstreams():
    batch, new = batch_of("a", [4]), [new_request("b", [1, 2], [5])]
    output = scheduler_output({"a": 1, "b": 2}, new=new, cached={"a": ([], 4, 2)})
    left = bookkeeping().update_plain_requests(output, batch, requests_of("a"))
    assert left.scheduled_new_reqs == new
    assert left.scheduled_cached_reqs.req_ids == []


def test_requests_that_something_reads_are_not_updated_in_the_tables_only():
    assert bookkeeping().can_batch_update({})
    assert not bookkeeping().can_batch_update({"a": 1})
    assert not bookkeeping(requests_are_read=True).can_batch_update({})


@pytest.mark.parametrize(
    "change",
    [
        {"generators": {0: None}},
        {"num_reqs": 3},
        {"prompt_logprobs": {"a": 1}},
    ],
)
def test_samples_that_need_more_are_upstreams(change):
    batch, wanted = batch_of("ab", [4, 4]), change.pop("prompt_logprobs", {})
    vars(batch).update(change)
    assert not bookkeeping().can_append_together(batch, sampled(5, 6), wanted)
    assert bookkeeping().can_append_together(batch_of("ab", [4, 4]), sampled(5, 6), {})


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


def test_samples_that_stay_on_the_device_leave_a_placeholder():
    batch = batch_of("ab", [3, 4])
    output = sampled(5, 6)
    *_, tokens, _, _, _, invalid = bookkeeping(asynchronous=True).append_sampled_tokens(
        batch, output, np.array([True, False])
    )
    assert tokens == [] and invalid == [0]
    assert batch.req_output_token_ids == [[7], [7, 7, PLACEHOLDER]]
    assert batch.prev_sampled_token_ids is output.sampled_token_ids
    assert batch.prev_req_id_to_index == {"b": 1}
    assert batch.num_tokens_no_spec.tolist() == [3, 5]


def test_a_request_without_room_for_its_token_is_named():
    batch = batch_of("ab", [4, MAX_MODEL_LEN])
    with pytest.raises(AssertionError, match="request b holds max_model_len=8 tokens"):
        bookkeeping().append_sampled_tokens(batch, sampled(5, 6), np.zeros(2, bool))
