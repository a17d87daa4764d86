"""The reference documents' numbers come out of the pure core and of the oracle, exactly."""

import pytest

from tests.helpers import worked_examples
from vllm_npu_prep.prep.oracle import OracleRequest, oracle_step


@pytest.mark.parametrize("name", worked_examples.NAMES)
def test_oracle_reproduces_the_worked_example(name):
    scenario, expected = worked_examples.load(name)
    requests = [
        OracleRequest(**{key: value for key, value in request.items() if key != "req_id"})
        for request in scenario["requests"]
    ]
    step = oracle_step(
        requests, block_size=scenario["block_size"], max_model_len=scenario["max_model_len"]
    )
    mask, expected_mask = step.pop("attn_mask"), expected.pop("attn_mask")
    assert step == expected
    if expected_mask is None:
        assert mask is None
    elif "masked" in expected_mask:
        assert mask == expected_mask["masked"]
    else:
        assert [len(mask), len(mask[0])] == expected_mask["shape"]
        first = worked_examples.first_masked(mask)
        assert first == expected_mask["first_masked_position_by_row"]
