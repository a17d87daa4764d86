"""Asynchronous outputs: tensors stay until they are copied, and a failure is told."""

import gc
import weakref

import pytest
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput

from vllm_npu_prep.observe.watched_output import WatchedOutput
from vllm_npu_prep.runner.outputs_in_flight import OutputsInFlight


class Event:
    done = False

    def query(self) -> bool:
        return self.done


class Output(AsyncModelRunnerOutput):
    """As vLLM's, which lets go of its tensors once its answer was taken."""

    def __init__(self) -> None:
        self.async_copy_ready_event = Event()
        self._sampled_token_ids = torch.zeros(4)
        self._logprobs_tensors = None

    def get_output(self):
        raise AssertionError("nobody asks on a rank that returns nothing")

    def get_kv_connector_output(self):
        """What vLLM 0.33.0 asks of a step that failed."""


def test_tensors_of_a_dropped_output_live_until_their_copy():
    outputs, first, second = OutputsInFlight(), Output(), Output()
    tensors = [weakref.ref(each._sampled_token_ids) for each in (first, second)]
    events = [each.async_copy_ready_event for each in (first, second)]
    outputs.keep(first)
    outputs.keep(second)
    del first, second
    gc.collect()
    assert all(tensor() is not None for tensor in tensors)
    events[0].done = True
    outputs.keep(None)  # a step that returns nothing
    assert tensors[0]() is None and tensors[1]() is not None
    assert len(outputs) == 1
    events[1].done = True
    outputs.keep(None)
    assert tensors[1]() is None and len(outputs) == 0


def test_who_waits_in_vain_gets_the_error_after_it_was_told():
    output, told = Output(), []
    with pytest.raises(AssertionError, match="nobody asks"):
        WatchedOutput(output, told.append).get_output()
    assert [type(error) for error in told] == [AssertionError]
    output.get_output = lambda: "samples"  # type: ignore[method-assign,return-value]
    assert WatchedOutput(output, told.append).get_output() == "samples"
    assert len(told) == 1
