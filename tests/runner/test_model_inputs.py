"""What requests bring beside token ids follows the rows of the batch."""

from types import SimpleNamespace

import torch

from tests.helpers.stepping import new_request, scheduler_output
from vllm_npu_prep.model_inputs import ModelInputRunner


class Runner:
    """As much of a runner as rows need."""

    supports_mm_inputs, uses_mrope, mrope_tables = True, True, None
    follow_rows = ModelInputRunner._follow_rows

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(req_ids=[])
        self.requests, self._request_inputs = {}, {}

    def step(self, rows: list[str], new: dict[str, int] | None = None) -> list[int]:
        """Row by row, how far M-RoPE lags behind the sequence."""
        for name, delta in (new or {}).items():
            self.requests[name] = SimpleNamespace(
                mm_features=[], mrope_position_delta=delta, mrope_positions=torch.zeros(3, 2)
            )
        self.input_batch.req_ids = rows
        requests = [new_request(name, [1, 2], [1]) for name in new or ()]
        self.follow_rows(scheduler_output(dict.fromkeys(rows, 1), new=requests))
        return [row.mrope_position_delta for row in self._request_inputs.values()]


def test_rows_that_move_take_along_what_their_requests_bring():
    runner = Runner()
    assert runner.step(["a", "b"], {"a": -1, "b": -2}) == [-1, -2]
    before = dict(runner._request_inputs)
    assert runner.step(["b", "a"]) == [-2, -1]
    assert runner.step(["a"]) == [-1]
    assert runner._request_inputs["a"] is before["a"]  # worked out once


def test_a_request_id_that_comes_back_at_once_brings_what_is_new():
    runner = Runner()
    assert runner.step(["a", "b"], {"a": -1, "b": -2}) == [-1, -2]
    assert runner.step(["a", "b"], {"a": -7}) == [-7, -2]
