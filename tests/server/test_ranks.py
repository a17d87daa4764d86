"""``vllm serve`` on two ranks: answers, metrics, and the end of a server that loses one."""

import contextlib
import http.client
import json
import os
import signal
import time

import psutil
import pytest

from examples import tiny_model
from tests.server.test_server import Server, check_clean_stop

QUESTION, ANSWER = tiny_model.exchanges()[0]
SECONDS = 60
"""In which a server that lost a rank ends."""


def wait_for_end(server: Server, began: float) -> int:
    code = server.process.wait(SECONDS)
    print(f"the server ended after {time.monotonic() - began:.1f} s with code {code}")
    return code


def worker(server: Server, name: str) -> psutil.Process:
    (found,) = (each for each in server.children if each.name().startswith(f"VLLM::{name}"))
    return found


@pytest.mark.parametrize("lost", ["Worker_TP1"])
def test_a_rank_that_dies_ends_the_server_with_a_message_and_no_orphan(demo_model, tmp_path, lost):
    """Both ranks prepare each step, and it is counted once."""
    server = Server(demo_model, tmp_path / "log", "--tensor-parallel-size", "2", "--enforce-eager")
    try:
        assert server.chat(QUESTION) == ANSWER
        body = {"prompt": [*range(40, 53)], "max_tokens": 4, "ignore_eos": True}
        before = server.metrics()
        assert server.request("POST", "/v1/completions", body)[0] == 200
        after = server.metrics()
        assert after["prepare_time_seconds_count"] - before["prepare_time_seconds_count"] == 4

        connection = server.connect()
        body |= {"max_tokens": 450, "stream": True}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        response.read(20)
        began = time.monotonic()
        os.kill(worker(server, lost).pid, signal.SIGKILL)
        with contextlib.suppress(http.client.IncompleteRead):  # the stream is cut, or says so
            assert b"error" in response.read()
        assert wait_for_end(server, began) == 1
        log = server.log()
        assert "died unexpectedly (exit code: -9)" in log
        assert log.strip().splitlines()[-1].endswith("the first error above says why")
        _, alive = psutil.wait_procs(server.children, timeout=10)
        assert not alive, f"left behind: {alive}"
    finally:
        server.kill()


def test_two_engines_answer_and_stop_cleanly(demo_model, tmp_path):
    flags = ("--data-parallel-size", "2", "--api-server-count", "1", "--enforce-eager")
    server = Server(demo_model, tmp_path / "log", *flags)
    try:
        assert [server.chat(QUESTION) for _ in range(4)] == [ANSWER] * 4
        check_clean_stop(server, signal.SIGTERM)
    finally:
        server.kill()
