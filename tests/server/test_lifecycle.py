"""A server's life: it answers, drains and stops; comes back; and ends when its engine is killed."""

import contextlib
import http.client
import json
import os
import signal
import time

from tests.server.test_server import QUESTIONS, Server, check_all_gone, check_clean_stop

FLAGS = ("--max-model-len", "1024", "--shutdown-timeout", "60", "--enforce-eager")
LONG = {"prompt": "one, two,", "ignore_eos": True, "stream": True, "temperature": 0}
SEEDED = {"temperature": 2.0, "seed": 7}


def stream(server: Server, max_tokens: int) -> http.client.HTTPResponse:
    """A long answer of which the first bytes are there."""
    connection = server.connect()
    body = {**LONG, "max_tokens": max_tokens}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.read(20)
    return response


def answers(server: Server) -> list[list[int]]:
    """Token ids; the last of them sampled with a seed, a long prompt in chunks among them."""

    def tokens(question: str, **params) -> list[int]:
        return server.choice(question, return_token_ids=True, **params)["token_ids"]

    questions = [question for question, _ in QUESTIONS[:3]]
    asked = [*questions, " ".join(questions * 3)]
    return [tokens(each) for each in asked] + [tokens(each, **SEEDED) for each in asked]


def test_sigterm_drains_and_the_next_server_gives_the_same_answers(demo_model, tmp_path):
    """The second one's engine is killed, which ends it with a message, code 1 and no orphan."""
    first = Server(demo_model, tmp_path / "first", *FLAGS)
    try:
        expected = answers(first)
        assert not any(likely == sampled for likely, sampled in zip(expected[:4], expected[4:]))
        running = stream(first, 900)
        first.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while (status := first.request("GET", "/health")[0]) == 200:
            assert time.monotonic() < deadline
        refused, why = first.request("POST", "/v1/completions", {**LONG, "max_tokens": 4})
        assert (status, refused) == (503, 503)
        assert json.loads(why)["error"]["code"] == 503
        assert first.request("GET", "/metrics")[0] == 200
        rest = running.read()
        assert rest.count(b'"finish_reason":"length"') == 1
        assert rest.rstrip().endswith(b"data: [DONE]")
        check_clean_stop(first)
        assert "Stopping: waiting up to 60 s for 1 request to finish." in first.log()
    finally:
        first.kill()

    second = Server(demo_model, tmp_path / "second", *FLAGS)
    try:
        assert answers(second) == expected
        running = stream(second, 900)
        (engine,) = (each for each in second.children if each.name() == "VLLM::EngineCore")
        os.kill(engine.pid, signal.SIGKILL)
        with contextlib.suppress(http.client.IncompleteRead):  # the stream is cut, or says so
            assert b"error" in running.read()
        assert second.process.wait(60) == 1
        errors = [line for line in second.log().splitlines() if "error:" in line]
        why = "the engine died, and the server ends with it; EngineCore was killed by SIGKILL"
        assert errors == [f"vllm_npu_prep: error: {why}"]
        assert "Traceback" not in second.log()
        assert "Waiting for the engine to start" in second.log()
        check_all_gone(second)
    finally:
        second.kill()


def test_a_request_that_outlasts_the_drain_does_not_keep_the_server(demo_model, tmp_path):
    """Told by Ctrl-C. Its stream ends with an error; the log tells progress and has none."""
    flags = ("--shutdown-timeout", "3", "--enforce-eager", "--max-model-len", "4096")
    server = Server(demo_model, tmp_path / "log", *flags)
    try:
        running = stream(server, 4000)
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        rest = running.read()
        assert b"error" in rest and b"DONE" not in rest[: rest.find(b"error")]
        assert time.monotonic() - began > 2.5
        check_clean_stop(server)
        log = server.log()
        for line in (
            "Stopping: waiting up to 3 s for 1 request to finish.",
            "s, 1 request left, ",
            "Aborting 1 request that did not finish within 3 s.",
        ):
            assert line in log
        assert "force killing" not in log
    finally:
        server.kill()
