"""What changes under a running engine: its prefix cache, requests taken back."""

import pytest

from tests.conftest import SEED
from tests.helpers.engine import greedy
from tests.helpers.huggingface import reference
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import ALSO_V2, engine_of
from tests.helpers.watch import count_preemptions

LENGTHS = [30, 5, 41, 17, 33]


@pytest.fixture(scope="module")
def expected(qwen3):
    return reference(qwen3, prompts_of(SEED, LENGTHS), 20)


@pytest.mark.parametrize("runner_name", ALSO_V2)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_reset_takes_running_requests_back_and_they_come_again(
    qwen3, expected, asynchronous, runner_name
):
    """During chunks, at the first tokens, and among decodes; what is running refuses otherwise."""
    sizes = {"block_size": 8, "max_num_batched_tokens": 32}
    with engine_of(runner_name, qwen3, **sizes, async_scheduling=asynchronous) as llm:
        core, count, tokens = llm.llm_engine, count_preemptions(llm), {}
        for index, prompt in enumerate(prompts_of(SEED, LENGTHS)):
            core.add_request(str(index), {"prompt_token_ids": prompt}, greedy(20))
        for step in range(1000):
            if not core.has_unfinished_requests():
                break
            if step in (1, 3, 6, 7, 12):
                assert not llm.reset_prefix_cache()
                assert llm.reset_prefix_cache(reset_running_requests=True)
            for output in core.step():
                if output.finished:
                    tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
    assert count["preempted"] > len(LENGTHS)
    assert [tokens[index] for index in range(len(LENGTHS))] == expected
