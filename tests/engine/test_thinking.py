"""Budgets of thinking tokens: the end is forced when they are used up, on both runners alike."""

import pytest

from tests.helpers.engine import generate, greedy, make_model, save_tokenizer
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import RUNNERS, engine_of
from tests.helpers.watch import count_preemptions

START, END = 5, [7, 8]
BUDGETS = (0, 1, 3, 12, None)
THINKS = {
    "reasoning_config": {"reasoning_start_str": "t5", "reasoning_end_str": "t7 t8"},
    "skip_tokenizer_init": False,
}
ALLOWED = [START, *END, *range(20, 40)]
"""Random models choose among few tokens, so that they begin to think by themselves."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("qwen3"))
    save_tokenizer(folder)
    return folder


@pytest.fixture
def prompts(seed):
    """Of each budget one that thinks already, one that did, and one that doesn't."""
    found = prompts_of(seed, [9, 33, 70] * len(BUDGETS))
    for index, prompt in enumerate(found):
        prompt[:] = [token if token > 8 else 9 for token in prompt]
        if index % 3 == 0:
            prompt[-5] = START
        if index % 3 == 1:
            prompt[3:8] = [START, 11, 12, *END]
    return found


def asked(llm, prompts, **params):
    budgets = [budget for budget in BUDGETS for _ in range(3)]
    return generate(
        llm, prompts, [greedy(40, thinking_token_budget=budget, **params) for budget in budgets]
    )


SETTINGS = THINKS | {
    "block_size": 16,
    "num_gpu_blocks_override": 26,
    "additional_config": {"npu_prep": {"check": "full"}},
}
"""Few blocks: requests are preempted while they think."""


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_v2_ends_thinking_where_v1_does(model, prompts, async_scheduling):
    """Thoughts that prompts begin and those that a model begins itself, while others wait.

    On V1 nobody is preempted: vLLM's V1 counts anew then, and may force a part of the end again.
    """
    found, preempted = {}, {}
    for runner in ("V1", "V2"):
        settings = SETTINGS | {"async_scheduling": async_scheduling}
        if runner == "V1":
            del settings["num_gpu_blocks_override"]
        with engine_of(runner, model, **settings) as llm:
            preempted[runner] = count_preemptions(llm)
            found[runner] = [asked(llm, prompts), asked(llm, prompts, allowed_token_ids=ALLOWED)]
            free = generate(llm, prompts, greedy(40))
    assert preempted["V2"]["preempted"] > 0 and not preempted["V1"]
    assert found["V2"] == found["V1"]
    assert found["V2"][0] != free and found["V2"][0][-3:] == free[-3:]


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_budget_leaves_with_its_request(model, prompts, runner):
    """Requests without one move to the rows of those that had one, and think on."""
    budgeted = greedy(3, thinking_token_budget=2, allowed_token_ids=ALLOWED)
    free = greedy(40, allowed_token_ids=ALLOWED)
    with engine_of(runner, model, **THINKS, max_num_seqs=16) as llm:
        expected = generate(llm, prompts, free)
        mixed = [budgeted if number < 5 else free for number in range(len(prompts))]
        got = generate(llm, prompts, mixed)
    assert got[5:] == expected[5:]
    assert sum(answer[:30].count(START) for answer in expected[-5:]) > 3
