"""What is still on the device after a step."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_npu_prep.device.cpu import CPUDevice
from vllm_npu_prep.runner.v1.speculation import NO_SAMPLES, Speculation


def speculation(**settings) -> Speculation:
    return Speculation(CPUDevice(), 4, **settings)


def test_without_samples_on_the_device_nothing_is_scattered():
    part = speculation(num_spec_tokens=2, asynchronous=True)
    assert part.last_samples(None, torch.ones(2, 2)) is NO_SAMPLES


def test_samples_without_drafts_are_one_for_each_row():
    sampled = torch.tensor([[7], [8]])
    found = speculation(asynchronous=True).last_samples(sampled, None)
    assert found.token_ids.tolist() == [7, 8]
    assert found.token_ids.dtype == torch.int32
    assert (found.num_rows, found.num_drafts) == (2, 0)


def test_drafts_follow_their_sample_twice():
    part = speculation(num_spec_tokens=2, asynchronous=True)
    sampled = torch.tensor([[7], [8]], dtype=torch.int32)
    drafts = torch.tensor([[1, 2], [3, 4]])
    part.keep_samples(sampled, drafts)
    found = part.last_samples(sampled, drafts)
    assert found.token_ids.tolist() == [7, 1, 2, 1, 2, 8, 3, 4, 3, 4]
    assert (found.num_rows, found.num_drafts) == (2, 2)


def test_drafts_that_the_host_knows_are_not_scattered():
    """Synchronous: they come with the scheduler's output."""
    found = speculation(num_spec_tokens=2).last_samples(torch.tensor([[7]]), [[1, 2]])
    assert found.num_drafts == 0


def test_drafts_are_counted_by_row():
    for drafts, expected in (
        ({"b": [5, 6]}, [0, 2, 0]),
        ({"c": [5, 6], "a": [7], "b": []}, [1, 0, 2]),
        ({"a": [5, 6], "b": [7], "c": [8, 9, 9]}, [2, 1, 3]),
    ):
        counts = speculation().num_draft_tokens(drafts, ["a", "b", "c"])
        assert counts.tolist() == expected
        assert counts.dtype == np.int32


def test_a_sample_on_the_device_is_a_token_more_than_computed():
    batch = SimpleNamespace(
        num_reqs=3,
        num_tokens_no_spec=np.array([9, 9, 9], np.int32),
        num_computed_tokens_cpu=np.array([4, 5, 6], np.int32),
    )
    speculation().set_known_tokens(batch, np.array([2, -1, 0, 1]))
    assert batch.num_tokens_no_spec.tolist() == [5, 9, 7]


@pytest.mark.parametrize(
    ("num_spec_tokens", "asynchronous", "copies"),
    [(1, False, 0), (2, False, 1), (1, True, 1)],
)
def test_kept_tokens_travel_to_the_host_if_somebody_waits(num_spec_tokens, asynchronous, copies):
    part = speculation(num_spec_tokens=num_spec_tokens, asynchronous=asynchronous)
    part.count_kept_tokens(torch.tensor([2, 1], dtype=torch.int32))
    assert part.num_valid_tokens.started == copies
    if copies:
        assert part.num_valid_tokens.read().tolist() == [2, 1]
