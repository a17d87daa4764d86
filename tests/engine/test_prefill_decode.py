"""Prompts that one engine computes and another one decodes, in two processes, over Mooncake itself.

Every kind of plane, both runners, and ranks of other numbers. What is refused, and what becomes of
failures, `tests/engine/test_mooncake.py` shows with a stand-in for the transfer engine.
"""

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import SEED
from tests.engine.test_mooncake import CASES as MODELS
from tests.engine.test_mooncake import MAX_TOKENS
from tests.helpers.engine import make_model
from tests.helpers.huggingface import is_varied, reference
from tests.helpers.prefill_decode import Pair
from tests.helpers.prompts import prompts_of
from tests.helpers.ranks import PRELOADED

RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "latent": ("latent", "V2", {}, {}),
    "windows": ("windows", "V2", {}, {}),
    "hybrid": ("hybrid", "V2", {}, {}),
    "V1": ("K and V", "V1", {}, {}),
    "two ranks to one": ("K and V", "V2", RANKS, {}),
    "one rank to two": ("K and V", "V2", {}, RANKS),
}
"""Model, runner, and settings of the producer and of the consumer."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    made = Pair(context, ({}, {}))
    yield made
    made.end()


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(pair, tmp_path, name):
    """At most a prompt's last token is computed again; its beginning may be in the prefix cache."""
    of_model, runner, *own = CASES[name]
    config, lengths, more = MODELS[of_model]
    model, prompts = make_model(tmp_path / "model", **config), prompts_of(SEED, lengths)
    longer = [[*prompt, 7, 5, 3, 1] for prompt in prompts if len(prompt) > 1]
    expected = [reference(model, each, MAX_TOKENS) for each in (prompts, longer)]
    assert is_varied(expected[0])
    settings: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 48, **more}
    settings["additional_config"] = {"npu_prep": {"check": "full"}}
    with pair.engines(runner, model, *own, **settings) as free:
        for each, tokens in zip((prompts, longer), expected):
            found, fetched = pair.decode(each, MAX_TOKENS)
            assert found == tokens
            assert all(len(prompt) - had <= 1 for prompt, had in zip(each, fetched))
        assert [side.ask("free") for side in pair.sides] == free
