"""``vllm serve`` over two hosts of a Ray cluster, and the end of a server whose network is cut."""

import json
import random
import subprocess
import sys
import time

import pytest

from tests.helpers.waiting import LIMIT, wait_until
from tests.server.process import QUESTIONS
from tests.server.ray_hosts import ServerOnHost, two_hosts, why_no_hosts
from tests.server.test_lifecycle import CLIENTS, ERROR, asking

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
FLAGS = ["--pipeline-parallel-size", "2", "--enforce-eager"]
FLAGS += ["--kv-cache-memory-bytes", str(32 << 20)]
DIED = "RayWorkerProc rank=[1] died unexpectedly"
ENDS = {
    "the link is cut": (lambda host, server: host.cut(), 1, DIED),
    "a host is killed": (lambda host, server: host.kill(), 1, ERROR),
    "the server is killed": (lambda host, server: server.process.kill(), -9, ""),
}
"""What ends it, the server's exit code, and what its log says."""


@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
@pytest.mark.parametrize(("end", "wanted", "why"), ENDS.values(), ids=ENDS)
def test_two_hosts_serve_one_model_and_leave_nothing(demo_model, tmp_path, seed, end, wanted, why):
    """Each has a stage, which records its steps; what is left on either ends."""
    config = json.dumps({"npu_prep": {"record": {"dir": str(tmp_path / "steps")}}})
    question, answer = QUESTIONS[0]

    with two_hosts(**RAY) as (head, other):
        log = tmp_path / "log"
        server = ServerOnHost(head, demo_model, log, *FLAGS, "--additional-config", config)
        try:
            assert "ranks         2 pipeline stages, started by ray, over gloo" in server.log()
            workers = [*head.workers(), *other.workers()]
            assert [len(host.workers()) for host in (head, other)] == [1, 1]
            assert server.chat(question) == answer
            asked = head.command(sys.executable, "-m", "vllm_npu_prep.cli", "record")
            subprocess.run(asked, env=head.environment(), check=True)
            wait_until(lambda: len([*tmp_path.glob("steps/*-rank?/manifest.json")]) == 2)
            assert server.metrics()["prepare_time_seconds_count"] > 1

            with asking(server, [question], seed) as (answers, errors):
                time.sleep(random.Random(seed).random())
                end(other, server)
                code = server.process.wait(LIMIT)
            assert code == wanted and why in server.log()
            assert code < 0 or ERROR in server.log().strip().splitlines()[-1]
            assert len(errors) == CLIENTS, "each client heard of it"
            assert not any("Traceback" in each for each in errors)
            assert answers == [answers[0]] * len(answers)
            assert server.left(*workers) == []
        finally:
            server.kill()
