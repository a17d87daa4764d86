"""Requests that end while their step runs, in a KV cache that is too small for all of them."""

from collections import Counter

import numpy as np
import pytest

from tests.conftest import SEED
from tests.helpers.cache import CacheWatch, SharedBlocksWatch
from tests.helpers.engine import engine, greedy, make_model, runner_of
from tests.helpers.huggingface import reference
from tests.helpers.prompts import prompts_of
from tests.helpers.watch import count_preemptions

LENGTHS = [30, 28, 5, 41, 22, 29, 17, 33, 9, 38]
TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def expected(model):
    return reference(model, prompts_of(SEED, LENGTHS), TOKENS)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_aborts_and_preemptions_leave_other_requests_alone(model, expected, asynchronous):
    """What aborted requests had generated and what the others do are tokens of transformers."""
    rng, tokens, count = np.random.default_rng(SEED), {}, Counter()
    prompts = prompts_of(SEED, LENGTHS)
    with engine(
        model,
        block_size=4,
        num_gpu_blocks_override=40,
        max_model_len=96,
        max_num_batched_tokens=24,
        async_scheduling=asynchronous,
    ) as llm:
        core, preempted = llm.llm_engine, count_preemptions(llm)
        CacheWatch(runner_of(llm))
        SharedBlocksWatch(llm)
        alive: dict[str, int] = {}
        while count["added"] < 30 or core.has_unfinished_requests():
            if count["added"] < 30 and rng.random() < 0.3:
                index, name = int(rng.integers(len(LENGTHS))), str(count["added"])
                core.add_request(name, {"prompt_token_ids": prompts[index]}, greedy(TOKENS))
                alive[name] = index
                count["added"] += 1
            if alive and rng.random() < 0.06:
                name = str(rng.choice(list(alive)))
                core.abort_request([name])
                del alive[name]
                count["aborted"] += 1
            for output in core.step():
                if output.request_id in alive:
                    tokens[output.request_id] = (
                        alive[output.request_id],
                        list(output.outputs[0].token_ids),
                    )
                    if output.finished:
                        del alive[output.request_id]
                        count["finished"] += 1
    print(dict(count), dict(preempted))
    for index, got in tokens.values():
        assert got == expected[index][: len(got)]
    assert count["finished"] == sum(len(got) == TOKENS for _, got in tokens.values())
    assert min(count["finished"], count["aborted"], preempted["preempted"]) > 0
