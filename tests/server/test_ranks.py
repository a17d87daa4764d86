"""``vllm serve`` on several ranks: answers, metrics, records, and what is left of a killed one."""

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

from tests.helpers.waiting import LIMIT, wait_until
from tests.server.test_server import Server, check_all_gone

QUESTION, ANSWER = tiny_model.exchanges()[0]

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
    """Before: all ranks of an engine prepare a step, which is counted once; others know nothing.

    Whichever process is told to, the records of all ranks are written.
    """
    flags, lost, message = LAYOUTS[layout]
    flags += ("--additional-config", json.dumps({"npu_prep": {"record": {"dir": str(tmp_path)}}}))
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

        check_records(server, tmp_path, engines)

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
        assert server.process.wait(LIMIT) == 1
        print(f"the server ended after {time.monotonic() - began:.1f} s")
        log = server.log()
        assert message in re.search("^.*(ERROR | error: ).*$", log, re.MULTILINE)[0]
        assert "\nvllm_npu_prep: error: the engine died" in log
        check_all_gone(server)
    finally:
        server.kill()


def check_records(server: Server, folder: Path, engines: range) -> None:
    """SIGUSR1 to any process has both ranks write what each has prepared since the last time."""

    def written() -> dict[str, int]:
        # The first of several engines does not know of others, and its folder has no rank.
        folders = {each.parent for each in folder.glob("*/step-*")}
        return {each.name: len([*each.glob("step-*")]) for each in folders}

    processes = [server.process.pid, *(each.pid for each in of_vllm(server))]
    # An engine and two ranks; or two engines with a rank each, and their coordinator.
    assert len(processes) == (4 if len(engines) == 1 else 6)
    for pid in processes:
        before = written()
        for engine in engines:
            assert server.chat(QUESTION, engine=engine) == ANSWER
        os.kill(pid, signal.SIGUSR1)
        wait_until(
            lambda before=before: (
                len(now := written()) == 2 and all(now[each] > before.get(each, 0) for each in now)
            )
        )


def of_vllm(server: Server) -> list[psutil.Process]:
    """Processes that vLLM has started, without helpers of Python's."""
    return [each for each in server.children if each.name().startswith("VLLM::")]


def test_a_server_that_is_killed_leaves_no_process(demo_model, tmp_path):
    """It has started two API servers and an engine, which has started two ranks.

    Before that each of them is told to write records, which are not configured: none dies of it.
    """
    flags = ("--api-server-count", "2", "--tensor-parallel-size", "2", "--enforce-eager")
    server = Server(demo_model, tmp_path / "log", *flags)
    try:
        assert server.chat(QUESTION) == ANSWER
        processes = [server.process.pid, *(each.pid for each in of_vllm(server))]
        assert len(processes) == 6, processes
        says = "SIGUSR1: no steps are recorded: start with --additional-config"
        for number, pid in enumerate(processes, 1):
            os.kill(pid, signal.SIGUSR1)
            wait_until(lambda number=number: server.log().count(says) == number)
        assert server.chat(QUESTION) == ANSWER
        server.process.kill()
        check_all_gone(server)
        gone = f"stops: the process that started it (pid {server.process.pid}) is gone."
        for name in ("ApiServer_0", "ApiServer_1", "EngineCore"):
            assert f"{name} {gone}" in server.log()
    finally:
        server.kill()
