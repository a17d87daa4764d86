"""What torch_npu says of a device that failed while it worked, and what it says of other errors."""

from types import SimpleNamespace

import pytest
import torch

from vllm_npu_prep.device.failures import device_failure, lost_rank
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.worker import NPUWorker

REPORT = """ACL stream synchronize failed, error code:507015
[ERROR] 2026-11-25-07:30:00 (PID:4711, Device:0, RankID:-1) ERR00100 PTA call acl api failed
[Error]: The aicore execution is abnormal.
        Rectify the fault based on the error information in the ascend log.
EZ9999: Inner Error!
EZ9999: [PID: 4711] Aicore kernel execute failed, device_id=0, fault kernel_name=Mul_1e8b5, hash=3.
        TraceBack (most recent call last):
"""
GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:2747: "
    "Connection reset by peer. This is typically caused by a remote worker hanging or bugs. GLHF!"
)
LATE = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms"
UNEQUAL = (
    "[enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446] "
    "op.preamble.length <= op.nbytes. 8 vs 4"
)


def test_a_failure_is_told_in_one_line():
    assert device_failure(RuntimeError(REPORT)) == (
        "ACL stream synchronize failed, error code:507015; The aicore execution is abnormal; "
        "kernel Mul_1e8b5"
    )


def test_the_place_in_the_source_of_torch_npu_is_left_out():
    told = "wait(event_), error code is 507015"
    text = f"synchronize:../core/npu/NPUEvent.cpp:203 NPU function error: {told}"
    assert device_failure(RuntimeError(text)) == told


@pytest.mark.parametrize(
    "text",
    [
        "ACL stream synchronize failed, error code:107019",
        "aclrtSynchronizeEvent(event_), error code is 107020",
        "npuSynchronizeDevice failed, error code 507011",
    ],
)
def test_codes_of_what_runs_are_known_however_they_are_written(text):
    assert device_failure(RuntimeError(f"{text}\nmore")) == text


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("call aclnnGatherV2 failed, error code is 561103"),
        RuntimeError("aclrtCreateStream failed, error code is 207008"),
        RuntimeError("error code is 5070150"),
        RuntimeError("shapes differ"),
        ValueError("error code is 507015"),
        torch.OutOfMemoryError("NPU out of memory. Tried to allocate 9.00 GiB"),
    ],
)
def test_other_errors_keep_their_traceback(error):
    assert device_failure(error) is None


def test_ranks_that_disagree_are_no_lost_rank():
    assert lost_rank(RuntimeError(LATE)) == "Timed out waiting 1800000ms"
    assert lost_rank(RuntimeError(UNEQUAL)) is None


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError(REPORT), r"^the device failed, as was seen in a step with 9 tokens of 2 "),
        (torch.OutOfMemoryError("Tried 1"), r"^out of memory in a step with 9 tokens of 2 "),
        (RuntimeError(GLOO), r"^another rank was lost in a step .* \(Read error .* by peer\); "),
    ],
)
def test_what_fails_while_drafts_are_read_is_one_line(error, told):
    """They are read after the step, which may be the first wait for it."""

    def fail():
        raise error

    worker = NPUWorker.__new__(NPUWorker)
    worker.model_runner = SimpleNamespace(take_draft_token_ids=fail, recorder=None)
    worker._last_step = SimpleNamespace(
        total_num_scheduled_tokens=9, num_scheduled_tokens={"a": 4, "b": 5}
    )
    with pytest.raises(PrepError, match=told):
        worker.take_draft_token_ids()


def test_a_rank_without_requests_tells_of_a_lost_one():
    """It takes part in the steps of the others, under data parallelism."""

    def fail(*args, **how):
        raise RuntimeError(GLOO)

    worker = NPUWorker.__new__(NPUWorker)
    worker.model_runner = SimpleNamespace(_dummy_run=fail, recorder=None)
    with pytest.raises(PrepError, match=r"^another rank was lost in a step without requests \("):
        worker.execute_dummy_batch()
