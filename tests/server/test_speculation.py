"""Speculation by the flag of ``vllm serve``."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from examples import tiny_model
from tests.server.test_server import Server


@pytest.fixture(scope="module")
def server(demo_model, demo_drafters, tmp_path_factory):
    drafts = {
        "method": "eagle3",
        "model": str(demo_drafters / "eagle3"),
        "num_speculative_tokens": 3,
    }
    log = tmp_path_factory.mktemp("server") / "log"
    server = Server(demo_model, log, "--speculative-config", json.dumps(drafts))
    yield server
    server.kill()


def test_answers_are_what_the_model_learned_and_most_drafts_are_accepted(server):
    questions, answers = zip(*tiny_model.exchanges())
    with ThreadPoolExecutor(8) as pool:
        assert tuple(pool.map(server.chat, questions)) == answers
    metrics = server.request("GET", "/metrics")[1].decode()
    drafted, accepted = (
        float(
            re.search(rf"^vllm:spec_decode_num_{name}_tokens_total\{{.*\}} (\S+)$", metrics, re.M)[
                1
            ]
        )
        for name in ("draft", "accepted")
    )
    print(f"{accepted:.0f} of {drafted:.0f} drafts were accepted")
    assert drafted > 100
    assert 0.7 < accepted / drafted < 1
    assert "scheduling    asynchronous" in server.log()
