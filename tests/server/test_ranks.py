"""``vllm serve`` on several ranks: answers, metrics, and the end of a server that loses a rank."""

import contextlib
import http.client
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tiny_model

from tests.server.test_server import Server

QUESTION, ANSWER = tiny_model.exchanges()[0]
SECONDS = 60
"""In which a server that lost a rank ends."""

LAYOUTS = {
    "tensors": (
        ("--tensor-parallel-size", "2"),
        "Worker_TP1",
        "Worker proc VllmWorker-1 died unexpectedly",  # its exit code may not be known yet
    ),
    "engines": (
        ("--data-parallel-size", "2", "--api-server-count", "1"),
        "EngineCore_DP1",
        "vllm_npu_prep: error: the engine died",  # upstream says nothing then
    ),
}


def num_steps(server: Server, engine: int) -> float:
    return server.metrics(engine).get("prepare_time_seconds_count", 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_dies_ends_the_server_with_a_message_and_no_orphan(
    demo_model, tmp_path, layout
):
    """Before: all ranks of an engine prepare a step, which is counted once; others know nothing."""
    flags, lost, message = LAYOUTS[layout]
    server = Server(demo_model, tmp_path / "log", *flags, "--enforce-eager")
    engines = range(2 if layout == "engines" else 1)
    try:
        assert {server.chat(QUESTION, engine=engine) for engine in engines} == {ANSWER}
        body = {"prompt": [*range(40, 53)], "max_tokens": 4, "ignore_eos": True}
        headers = {"X-data-parallel-rank": str(engines[-1])}
        before = [num_steps(server, engine) for engine in engines]
        assert server.request("POST", "/v1/completions", body, **headers)[0] == 200
        counted = [num_steps(server, each) - was for each, was in zip(engines, before)]
        assert counted == [0] * (len(engines) - 1) + [4]

        connection = server.connect()
        body |= {"max_tokens": 450, "stream": True}
        headers |= {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        response.read(20)
        (rank,) = (each for each in server.children if each.name().startswith(f"VLLM::{lost}"))
        began = time.monotonic()
        os.kill(rank.pid, signal.SIGKILL)
        with contextlib.suppress(http.client.IncompleteRead):  # the stream is cut, or says so
            assert b"error" in response.read()
        assert server.process.wait(SECONDS) == 1
        print(f"the server ended after {time.monotonic() - began:.1f} s")
        log = server.log()
        assert message in re.search("^.*(ERROR | error: ).*$", log, re.MULTILINE)[0]
        assert "\nvllm_npu_prep: error: the engine died" in log
        _, alive = psutil.wait_procs(server.children, timeout=10)
        assert not alive, f"left behind: {alive}"
    finally:
        server.kill()
