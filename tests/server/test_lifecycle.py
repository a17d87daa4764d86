"""A server's life: it answers, drains and stops; ends when it loses a process, and comes back."""

import contextlib
import http.client
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.helpers.waiting import LIMIT, wait_until
from tests.server.hostile import COMPLETIONS
from tests.server.test_server import QUESTIONS, Server, check_all_gone, check_clean_stop
from vllm_npu_prep.observe.metrics import FOLDER_ENV_VAR, SHARED_ENV_VAR

FLAGS = ("--max-model-len", "1024", "--shutdown-timeout", str(LIMIT), "--enforce-eager")
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


def shared_by(server: Server) -> set[Path]:
    """Shared memory that its processes have mapped, and the folder that they count steps in.

    Several API servers count in a folder of vLLM's.
    """
    found = set()
    for process in server.children:
        with contextlib.suppress(psutil.Error):
            maps = [Path(each.path) for each in process.memory_maps() if "/dev/shm/" in each.path]
            found |= {path for path in maps if path.exists()}
            environment = process.environ()
            names = {FOLDER_ENV_VAR, SHARED_ENV_VAR} & environment.keys()
            found |= {Path(environment[name]) for name in names}
    return found


@contextlib.contextmanager
def load(server: Server, expected: dict[str, list[int]], seed: int) -> Iterator[list[str]]:
    """Requests of several clients until the server ends; gives what came of each.

    The block runs once all clients have had answers, and is to end the server. An answer that comes
    has to be right, and each client has to hear of the end.
    """
    outcomes: list[str] = []
    served, over = threading.Semaphore(0), threading.Event()

    def client(number: int) -> None:
        rng = random.Random(seed + number)
        while not over.is_set():
            question = rng.choice(list(expected))
            body = {"prompt": question, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
            try:
                status, told = server.request(
                    "POST", COMPLETIONS, body | {"return_token_ids": True}
                )
            except (OSError, http.client.HTTPException) as error:
                outcomes.append(type(error).__name__)
                return
            if status != 200:
                outcomes.append(f"{status} {json.loads(told)['error']['message']}")
                return
            assert json.loads(told)["choices"][0]["token_ids"] == expected[question]
            outcomes.append("answered")
            served.release()

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            for _ in range(2 * CLIENTS):
                assert served.acquire(timeout=LIMIT)
            yield outcomes
            for each in clients:
                each.result(timeout=LIMIT)
        finally:  # where the block failed, the server goes on, and so would they
            over.set()


CLIENTS = 12
KILLED = {
    "engine": ("VLLM::EngineCore", (), "EngineCore was killed by SIGKILL"),
    "worker": (
        "VLLM::Worker_TP1",
        ("--tensor-parallel-size", "2"),
        "Worker proc VllmWorker-1 died unexpectedly",
    ),
    "API server": ("VLLM::APIServer_1", ("--api-server-count", "2"), "ApiServer_1"),
    "main process": (None, (), "stops: the process that started it"),
}
"""What is killed: how its name begins, flags of the server, and what its log says of it."""


@pytest.mark.parametrize("killed", KILLED)
def test_a_server_that_loses_a_process_under_load_ends_and_the_next_one_answers(
    demo_model, tmp_path, seed, killed
):
    """No answer is wrong, each client hears of it, nothing is left of it, and its port is free.

    The second server on this port gives the same answers, and drains when it is told to stop.
    """
    name, flags, why = KILLED[killed]
    first = Server(demo_model, tmp_path / "first", *FLAGS, *flags)
    try:
        expected = answers(first)
        assert not any(likely == sampled for likely, sampled in zip(expected[:4], expected[4:]))
        prompts = {}
        for question, _ in QUESTIONS[:6]:
            body = {"prompt": question, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
            told = first.request("POST", COMPLETIONS, body | {"return_token_ids": True})[1]
            prompts[question] = json.loads(told)["choices"][0]["token_ids"]
        shared = shared_by(first)
        with load(first, prompts, seed) as outcomes:
            time.sleep(random.Random(f"{seed} {killed}").random())
            if name is None:
                first.process.kill()
            else:
                (victim,) = (each for each in first.children if each.name().startswith(name))
                os.kill(victim.pid, signal.SIGKILL)
            code = first.process.wait(LIMIT)
        check_all_gone(first)
        failed = [each for each in outcomes if each != "answered"]
        print(killed, "exit code", code, Counter(outcomes))
        assert len(failed) == CLIENTS, "each client heard of it"
        assert not any("Traceback" in each for each in failed)
        assert why in first.log()
        if name is not None:
            errors = [line for line in first.log().splitlines() if "vllm_npu_prep: error:" in line]
            # Of an API server that is gone vLLM's main process tells, in its own words
            assert code == 1 and len(errors) == int(killed != "API server"), errors
        if killed == "engine":
            assert "Traceback" not in first.log()
    finally:
        first.kill()
    # A main process that is killed can't remove its folder, in which the next one doesn't look.
    assert len(shared) > 0
    left = {path for path in shared if path.exists()}
    assert {path for path in left if name is not None or "/dev/shm" in str(path)} == set()

    # Of two API servers the one without a request would end at once, whatever is sent to it.
    again = () if killed == "API server" else flags
    second = Server(demo_model, tmp_path / "second", *FLAGS, *again, port=first.port)
    try:
        assert answers(second) == expected
        running = stream(second, 900)
        second.process.send_signal(signal.SIGTERM)
        wait_until(lambda: second.request("GET", "/health")[0] == 503)
        refused, told = second.request("POST", COMPLETIONS, {**LONG, "max_tokens": 4})
        assert refused == 503
        assert json.loads(told)["error"]["code"] == 503
        assert second.request("GET", "/metrics")[0] == 200
        rest = running.read()
        assert rest.count(b'"finish_reason":"length"') == 1
        assert rest.rstrip().endswith(b"data: [DONE]")
        check_clean_stop(second)
        assert f"Stopping: waiting up to {LIMIT} s for 1 request to finish." in second.log()
        assert "Waiting for the engine to start" in second.log()
    finally:
        second.kill()


FAILING = {
    "memory": (
        (),
        "out of memory in a step with 1 token of 1 request (NPU out of memory. Tried to allocate "
        "9.00 GiB); lower --gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs",
    ),
    "kernel": (
        (),
        "the device failed, as was seen in a step with 1 token of 1 request (aclnnGatherV2 failed, "
        "error code 507015); start again.",
    ),
}


@pytest.mark.parametrize("manner", FAILING)
def test_a_step_that_fails_ends_the_server_with_its_reason(demo_model, tmp_path, manner):
    """A client that waits gets an error, and no process is left."""
    flags, why = FAILING[manner]
    server = Server(
        demo_model,
        tmp_path / "log",
        *("--max-model-len", "1024", "--enforce-eager", *flags),
        *("--logits-processors", "tests.helpers.failing:Fail"),
    )
    try:
        assert server.chat(QUESTIONS[0][0]) == QUESTIONS[0][1]
        body = {**LONG, "max_tokens": 900, "stream": False, "vllm_xargs": {"fail": manner}}
        with contextlib.suppress(OSError, http.client.HTTPException):  # cut, or told
            status, told = server.request("POST", COMPLETIONS, body)
            assert status == 500, told
        assert server.process.wait(LIMIT) == 1
        log = server.log()
        assert why in log
        assert log.count("vllm_npu_prep: error: the engine died") == 1
        # Of the process that failed; vLLM's API server adds its own
        told = [line for line in log.splitlines() if line.startswith("(EngineCore")]
        assert any(why in line for line in told)
        assert not any("Traceback" in line for line in told)
        check_all_gone(server)
    finally:
        server.kill()


def test_a_request_that_outlasts_the_drain_does_not_keep_the_server(demo_model, tmp_path):
    """Told by Ctrl-C. Its stream ends with an error; the log tells progress and has none."""
    seconds = 6  # of which the first two are not worth a line
    flags = ("--shutdown-timeout", str(seconds), "--enforce-eager", "--max-model-len", "4096")
    server = Server(demo_model, tmp_path / "log", *flags)
    try:
        running = stream(server, 4000)
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        rest = running.read()
        assert b"error" in rest and b"DONE" not in rest[: rest.find(b"error")]
        assert time.monotonic() - began > seconds - 0.5
        check_clean_stop(server)
        log = server.log()
        for line in (
            f"Stopping: waiting up to {seconds} s for 1 request to finish.",
            "s, 1 request left, ",
            f"Aborting 1 request that did not finish within {seconds} s.",
        ):
            assert line in log
        assert "force killing" not in log, log
    finally:
        server.kill()
