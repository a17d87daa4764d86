"""A pool of K and V in Mooncake's store: what one engine computed, later ones find there.

Here the store is a stand-in of this process; `tests/server/test_mooncake_store.py` has the real one
and its master.
"""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import SEED
from tests.engine.test_kv_transfer import count_tokens
from tests.engine.test_mooncake import BLOCK_SIZE, LENGTHS, MAX_TOKENS, outputs
from tests.engine.test_mooncake import CASES as MODELS
from tests.helpers.engine import free_blocks, generate, greedy, make_model
from tests.helpers.huggingface import is_varied, reference
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import engine_of, on_both
from tests.helpers.waiting import wait_until
from tests.helpers.watch import count_batched
from vllm_npu_prep.errors import PrepError

pytestmark = pytest.mark.filterwarnings(  # of SystemExit, which ends a thread
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)
HYBRID = {"block_size": 16, "enable_prefix_caching": True}
CASES = {name: (*case, HYBRID if name == "hybrid" else {}) for name, case in MODELS.items()}


def pooled(policy: str = "recompute", **settings: Any) -> dict[str, Any]:
    transfer = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    transfer["kv_load_failure_policy"] = policy
    return {
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 48,
        "additional_config": {"npu_prep": {"check": "full"}},
        "kv_transfer_config": transfer,
        **settings,
    }


@pytest.fixture(scope="module")
def expected(qwen3):
    return reference(qwen3, prompts_of(SEED, LENGTHS), MAX_TOKENS)


def found(llm: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Tokens, and how many tokens of each prompt were found."""
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    done = llm.generate(given, greedy(MAX_TOKENS), use_tqdm=False)
    tokens = [list(each.outputs[0].token_ids) for each in done]
    return tokens, [each.num_cached_tokens for each in done]


@pytest.fixture(autouse=True)
def ended_threads() -> Iterator[None]:
    """No thread of an engine outlives it."""
    before = {*threading.enumerate()}
    yield
    left = {*threading.enumerate()} - before
    wait_until(lambda: not [each for each in left if each.is_alive() and "Store" in each.name], 10)
    assert not [each for each in left if each.is_alive() and "process_request" in each.name]


@pytest.mark.parametrize(("config", "lengths", "settings", "more", "runner"), on_both(CASES))
def test_prompts_are_found_that_an_engine_before_computed(
    tmp_path, monkeypatch, store, config, lengths, settings, more, runner
):
    """Whole blocks are found, and at least a token is computed; tokens are transformers'.

    Requests that generate meanwhile are scheduled in bulk.
    """
    model, prompts = make_model(tmp_path / "model", **config), prompts_of(SEED, lengths)
    expected = reference(model, prompts, MAX_TOKENS)
    assert is_varied(expected)
    settings = pooled(**{**settings, **more})
    # Requests that did not wait for their blocks would be computed by then
    monkeypatch.setattr(store, "on_load", staticmethod(lambda: time.sleep(0.1)))
    for turn in range(2):
        with engine_of(runner, model, **settings) as llm:
            computed, batched, free = count_tokens(llm), count_batched(llm), free_blocks(llm)
            tokens, cached = found(llm, prompts)
            assert tokens == expected
            size = settings["block_size"]
            assert cached == [turn * ((length - 1) // size * size) for length in lengths]
            left = sum(lengths) - sum(cached) + len(lengths) * (MAX_TOKENS - 1)
            assert computed["scheduled"] == left
            assert batched["taken"] > len(prompts)
            assert free_blocks(llm) == free


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_blocks_that_are_gone_give_errors_or_the_same_tokens(
    qwen3, expected, monkeypatch, store, policy
):
    """They were found, and had left the pool when they were loaded. All blocks come back."""
    prompts = prompts_of(SEED, LENGTHS)
    with engine_of("V2", qwen3, **pooled(policy)) as llm:
        free = free_blocks(llm)
        assert generate(llm, prompts, greedy(MAX_TOKENS)) == expected
        assert free_blocks(llm) == free and llm.reset_prefix_cache()
        monkeypatch.setattr(store, "on_load", staticmethod(store.objects.clear))
        ended = outputs(llm, prompts, [greedy(MAX_TOKENS)] * len(prompts))
        for length, (reason, tokens), right in zip(LENGTHS, ended, expected):
            if policy == "recompute" or length <= BLOCK_SIZE:
                assert (reason, tokens) == ("length", right)
            elif (reason, tokens) != ("length", right):  # one that was looked up afterwards
                assert (reason, tokens) == ("error", [])
        assert ("error" in {reason for reason, _ in ended}) == (policy == "fail")
        assert generate(llm, prompts, greedy(MAX_TOKENS)) == expected
        assert free_blocks(llm) == free


def test_planes_of_another_form_are_not_found(qwen3, store):
    """An engine with another dtype has names of its own for the same prompts."""
    prompts, names = prompts_of(SEED, LENGTHS), []
    for dtype in ("float32", "bfloat16"):
        with engine_of("V2", qwen3, **pooled(dtype=dtype)) as llm:
            _, cached = found(llm, prompts)
            assert not any(cached)
            free_blocks(llm)  # once all are stored
        names.append({*store.objects}.difference(*names))
    assert len(names[0]) == len(names[1]) > 0


def test_a_store_that_is_not_there_is_one_line(qwen3, monkeypatch, store):
    monkeypatch.setattr(store, "setup", lambda *_: -1)
    with pytest.raises(PrepError, match=r"store-50051\.json says \(Initialize"):
        engine_of("V2", qwen3, **pooled()).__enter__()
