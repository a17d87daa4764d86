"""What requests bring beside token ids follows the rows of the batch."""

from types import SimpleNamespace

import torch

from vllm_npu_prep.runner.v1.model_inputs import ModelInputs


class Rows:
    """A batch whose requests bring M-RoPE positions that lag behind the sequence."""

    def __init__(self) -> None:
        self.inputs, self.requests = ModelInputs(4, mrope_dims=3), {}

    def step(self, rows: list[str], new: dict[str, int] | None = None) -> list[int]:
        """Row by row, how far they lag."""
        for name, delta in (new or {}).items():
            self.requests[name] = SimpleNamespace(
                mm_features=[], mrope_position_delta=delta, mrope_positions=torch.zeros(3, 2)
            )
        self.inputs.follow_rows(rows, set(new or ()), self.requests)
        return self.inputs.mrope_tables.position_deltas[: len(rows)].tolist()


def test_rows_that_move_take_along_what_their_requests_bring():
    rows = Rows()
    assert rows.step(["a", "b"], {"a": -1, "b": -2}) == [-1, -2]
    del rows.requests["a"], rows.requests["b"]  # what they bring was worked out once
    assert rows.step(["b", "a"]) == [-2, -1]
    assert rows.step(["a"]) == [-1]


def test_a_request_id_that_comes_back_at_once_brings_what_is_new():
    rows = Rows()
    assert rows.step(["a", "b"], {"a": -1, "b": -2}) == [-1, -2]
    assert rows.step(["a", "b"], {"a": -7}) == [-7, -2]


def test_only_text_alone_brings_nothing_that_has_to_follow():
    """Models may have images without M-RoPE, and M-RoPE without images."""
    with_images = ModelInputs(4, takes_items=True), ModelInputs(4, mrope_dims=3)
    assert [each.follows_rows for each in with_images] == [True, True]
    assert not ModelInputs(4).follows_rows
