"""The reference documents' numbers come out of the pure core and of the oracle, exactly."""

import pytest

from tests.helpers import worked_examples
from vllm_npu_prep.inspect.explain import explain_json
from vllm_npu_prep.inspect.scenario import parse_scenario
from vllm_npu_prep.inspect.view import StepView
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


def test_token_indices_do_not_give_block_table_indices():
    """The documents' note: rows of the two tables have different lengths, so division misleads."""
    scenario = {
        "block_size": 2,
        "max_model_len": 5,
        "max_num_reqs": 3,
        "max_num_batched_tokens": 10,
        "requests": [
            {
                "req_id": str(index),
                "num_computed_tokens": 0,
                "num_scheduled_tokens": length,
                "num_prompt_tokens": length,
                "block_ids": blocks,
                "token_ids": list(range(length)),
            }
            for index, (length, blocks) in enumerate([(2, [1]), (5, [2, 3, 4]), (3, [5, 6])])
        ],
    }
    step = explain_json(StepView.of_scenario(parse_scenario(scenario)))
    assert step["block_table_indices"] == [0, 0, 3, 3, 4, 4, 5, 6, 6, 7]
    assert step["block_table_indices"] != [index // 2 for index in step["token_indices"]]
