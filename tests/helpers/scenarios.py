"""Scenarios for tests of what shows a step."""

import copy
import json
from pathlib import Path

from tests.helpers import worked_examples
from vllm_npu_prep.inspect.view import StepView
from vllm_npu_prep.records.scenario import parse_scenario

EXAMPLES = Path(__file__).parents[2] / "examples/scenarios"
IMAGE = {"modality": "image", "offset": 2, "length": 4}
PATCHES = [
    [0, 1, 2, 2, 2, 2, 4, 5, 6, 7],
    [0, 1, 2, 2, 3, 3, 4, 5, 6, 7],
    [0, 1, 2, 3, 2, 3, 4, 5, 6, 7],
]


def view_of(scenario: dict) -> StepView:
    return StepView.of_scenario(parse_scenario(scenario))


def example(name: str, **changes) -> dict:
    """A scenario of `EXAMPLES`, with other settings."""
    return json.loads((EXAMPLES / f"{name}.json").read_text()) | changes


def small() -> dict:
    return copy.deepcopy(worked_examples.load("chunked-prefill")[0])


def with_an_image() -> dict:
    """A chunk with an image and a decode of the same prompt; a window group and another."""
    prompt = [1, 2, 9, 9, 9, 9, 5, 6, 7, 8]
    request = {
        "num_prompt_tokens": 10,
        "multimodal": [IMAGE],
        "mrope_positions": PATCHES,
        "mrope_position_delta": -2,
    }
    chunk = {"req_id": "a", "num_computed_tokens": 3, "num_scheduled_tokens": 5}
    decode = {"req_id": "b", "num_computed_tokens": 12, "num_scheduled_tokens": 1}
    scenario = {
        "block_size": 4,
        "max_model_len": 24,
        "max_num_reqs": 2,
        "max_num_batched_tokens": 16,
        "mrope_dims": 3,
        "sliding_window": 4,
        "requests": [
            request | chunk | {"block_ids": [3, 4], "token_ids": prompt},
            request | decode | {"block_ids": [0, 0, 5, 6], "token_ids": [*prompt, 11, 12, 13]},
        ],
        "more_kv_cache_groups": [{"block_size": 8, "block_ids": [[7], [9, 10]]}],
    }
    return copy.deepcopy(scenario)


def in_chunks() -> dict:
    """The small scenario's batch under a group that sees chunks of four tokens."""
    return small() | {"attention_chunk_size": 4}


def many(num_reqs: int, num_scheduled_tokens: int, num_computed_tokens: int = 40) -> dict:
    """A batch of equal requests."""
    seq_len = num_computed_tokens + num_scheduled_tokens
    blocks = -(-seq_len // 16)
    requests = [
        {
            "req_id": f"cmpl-{row}",
            "num_computed_tokens": num_computed_tokens,
            "num_scheduled_tokens": num_scheduled_tokens,
            "num_prompt_tokens": num_computed_tokens or 1,
            "block_ids": list(range(row * blocks + 1, (row + 1) * blocks + 1)),
            "token_ids": [7] * seq_len,
        }
        for row in range(num_reqs)
    ]
    return {
        "block_size": 16,
        "max_model_len": seq_len,
        "max_num_reqs": num_reqs,
        "max_num_batched_tokens": num_reqs * num_scheduled_tokens,
        "requests": requests,
    }
