"""``vllm serve`` over two hosts of a Ray cluster, and the end of a server whose network is cut."""

import contextlib
import http.client
import json
import random
import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from examples import tiny_model
from tests.helpers.cluster import Host, ServerOnHost, two_hosts, why_no_hosts
from tests.helpers.waiting import LIMIT, wait_until
from tests.server.hostile import COMPLETIONS
from tests.server.test_lifecycle import CLIENTS, load
from tests.server.test_server import QUESTIONS, check_all_gone

RAY = {
    # The head gives a host up after 4 times 3 seconds without an answer; 5 times 13 unless told.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
    # Either waits no longer on a connection that is silent for 5 + 5 seconds, and a host gives the
    # head up 5 later; 480 in all unless told.
    "RAY_grpc_client_keepalive_time_ms": "5000",
    "RAY_grpc_client_keepalive_timeout_ms": "5000",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
}
QUESTION, ANSWER = tiny_model.exchanges()[0]


FLAGS = ["--pipeline-parallel-size", "2", "--enforce-eager"]
FLAGS += ["--kv-cache-memory-bytes", str(32 << 20)]


@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
@pytest.mark.parametrize("end", ["the link is cut", "the server is killed", "a host is killed"])
def test_two_hosts_serve_one_model_and_nothing_is_left_after_its_end(
    demo_model, tmp_path, seed, end
):
    """Each has a stage; what is left on either ends. A host is killed at random, under load."""
    with two_hosts(**RAY) as (head, other):
        if end == "the server is killed":
            check_records_and_a_kill(head, other, demo_model, tmp_path, FLAGS)
            return
        if end == "a host is killed":
            check_a_killed_host(head, other, demo_model, tmp_path, seed)
            return
        server = ServerOnHost(head, demo_model, tmp_path / "log", *FLAGS)
        try:
            assert "ranks         2 stages, started by ray, over gloo" in server.log()
            assert [len(host.workers()) for host in (head, other)] == [1, 1]
            assert server.chat(QUESTION) == ANSWER
            assert server.metrics()["prepare_time_seconds_count"] > 1

            connection = server.connect()
            body = {"prompt": QUESTION, "max_tokens": 450, "ignore_eos": True, "stream": True}
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            response.read(20)
            connection.sock.settimeout(LIMIT)
            began = time.monotonic()
            workers = head.workers() + other.workers()
            other.cut()
            with contextlib.suppress(http.client.IncompleteRead):  # the stream is cut, or says so
                assert b"error" in response.read()
            assert server.process.wait(LIMIT) == 1
            print(f"the server ended after {time.monotonic() - began:.1f} s")
            log = server.log()
            assert f"address: {other.address}" in log and "has been marked dead" in log
            assert "RayWorkerProc rank=[1] died unexpectedly" in log
            assert log.strip().splitlines()[-1].endswith("the first error above says why")
            _, alive = psutil.wait_procs(server.children + workers, timeout=LIMIT)
            assert not alive, f"left behind: {alive}"
            print(f"the last of its processes ended after {time.monotonic() - began:.1f} s")
        finally:
            server.kill()


def check_a_killed_host(head: Host, other: Host, model: Path, folder: Path, seed: int) -> None:
    """Several clients ask when all of Ray on a host, and the rank there, are killed.

    Each hears of it, and no answer is wrong; the server ends with code 1, and nothing is left.
    """
    server = ServerOnHost(head, model, folder / "log", *FLAGS)
    try:
        expected = {}
        for question, _ in QUESTIONS[:4]:
            body = {"prompt": question, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
            told = server.request("POST", COMPLETIONS, body | {"return_token_ids": True})[1]
            expected[question] = json.loads(told)["choices"][0]["token_ids"]
        workers = head.workers() + other.workers()
        assert len(workers) == 2
        with load(server, expected, seed) as outcomes:
            time.sleep(random.Random(seed).random())
            began, killed = time.monotonic(), other.processes()
            for process in killed:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            code = server.process.wait(LIMIT)
        print(f"{len(killed)} killed; the server ended after {time.monotonic() - began:.1f} s")
        failed = [each for each in outcomes if each != "answered"]
        print("exit code", code, Counter(outcomes))
        assert code == 1
        assert len(failed) == CLIENTS, "each client heard of it"
        assert not any("Traceback" in each for each in failed)
        assert "vllm_npu_prep: error:" in server.log().strip().splitlines()[-1]
        _, alive = psutil.wait_procs(server.children + workers, timeout=LIMIT)
        assert not alive, f"left behind: {alive}"
        print(f"the last of its processes ended after {time.monotonic() - began:.1f} s")
    finally:
        server.kill()


def check_records_and_a_kill(
    head: Host, other: Host, model: Path, folder: Path, flags: list[str]
) -> None:
    """A server that is told to write its records, and then killed."""
    config = json.dumps({"npu_prep": {"record": {"dir": str(folder / "steps")}}})

    def newest() -> Path | None:
        return max(folder.glob("steps/*-rank1/step-*"), default=None)

    server = ServerOnHost(head, model, folder / "first", *flags, "--additional-config", config)
    try:
        workers = head.workers() + other.workers()
        for process in (server.process, workers[1]):  # a worker of Ray's writes its own
            assert server.chat(QUESTION) == ANSWER
            before = newest()
            process.send_signal(signal.SIGUSR1)
            wait_until(lambda before=before: newest() != before)
        wait_until(lambda: len([*folder.glob("steps/*-rank?/manifest.json")]) == 2)
        server.process.kill()
        check_all_gone(server, *workers)
    finally:
        server.kill()
