"""Prompts computed by one server and decoded by another one, over Mooncake's own transfer engine.

A user asks the proxy of `examples/`. The servers are killed at the end, one after the other.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.prefill_decode import variables_of_mooncake
from tests.helpers.waiting import wait_until
from tests.server.process import COMPLETIONS, JSON, QUESTIONS, ROOT, Server, free_port
from tests.server.test_stack import bench
from vllm_npu_prep.cli import main
from vllm_npu_prep.inspect.run import read_run

ASKED = [question for question, _ in QUESTIONS[:8]]
ANSWERS = dict(QUESTIONS)
ROLES = "kv_producer", "kv_consumer"
SECONDS_TO_GIVE_UP = "5"


@pytest.fixture(scope="module")
def transfer_engine() -> dict[str, str]:
    """Variables with which a server finds Mooncake."""
    return variables_of_mooncake()


class Proxy(Server):
    """The proxy as a process; it is asked as a server is."""

    def __init__(self, log: Path, model: Path, prefill: Server, bootstrap: int, decode: Server):
        self.port, self.log_path, self.model = free_port(), log, str(model)
        address = "http://127.0.0.1:{}".format
        script = str(ROOT / "examples" / "prefill_decode_proxy.py")
        command = [sys.executable, script, "--port", str(self.port)]
        command += ["--prefill", address(prefill.port), address(bootstrap)]
        command += ["--decode", address(decode.port)]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, process_group=0
            )
        wait_until(self._is_up)


class Deployment:
    """A server that computes prompts, one that decodes, and the proxy before them."""

    def __init__(self, model: Path, folder: Path, variables: dict[str, str]) -> None:
        bootstrap = free_port()
        environment = {
            "PYTHONPATH": f"{ROOT}:{variables['PYTHONPATH']}",
            "LD_LIBRARY_PATH": variables["LD_LIBRARY_PATH"],
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap),
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": SECONDS_TO_GIVE_UP,
        }

        def start(role: str) -> Server:
            transfer = {"kv_connector": "MooncakeConnector", "kv_role": role}
            transfer["kv_load_failure_policy"] = "recompute"
            # Without a prefix cache each prompt is fetched
            flags = ("--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(transfer))
            steps = {"npu_prep": {"record": {"dir": str(folder / role)}}}
            flags += ("--enforce-eager", "--additional-config", json.dumps(steps))
            return Server(model, folder / f"{role}.log", *flags, **environment)

        with ThreadPoolExecutor(2) as pool:
            self.prefill, self.decode = pool.map(start, ROLES)
        self.folder = folder
        self.proxy = Proxy(folder / "proxy.log", model, self.prefill, bootstrap, self.decode)

    def held(self) -> list[float]:
        return self.prefill.held() + self.decode.held()

    def loaded(self, source: str = "external_kv_transfer") -> float:
        """Tokens of prompts that the decoding server has fetched, or has of another source."""
        name = "vllm:prompt_tokens_by_source_total"
        return sum(
            each.value
            for each in self.decode.samples()
            if each.name == name and each.labels["source"] == source
        )

    def kill(self) -> None:
        for each in (self.proxy, self.prefill, self.decode):
            each.kill()


@pytest.fixture(scope="module")
def deployment(demo_model, tmp_path_factory, transfer_engine) -> Iterator[Deployment]:
    made = Deployment(demo_model, tmp_path_factory.mktemp("prefill-decode"), transfer_engine)
    yield made
    made.kill()


def answers(server: Server) -> list[str]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(server.chat, ASKED))


def test_answers_are_those_of_one_server(deployment):
    """All of a prompt but its last token is fetched, and both sides have all blocks again."""
    assert answers(deployment.proxy) == [ANSWERS[question] for question in ASKED]
    assert deployment.loaded() > 10 * len(ASKED)
    assert deployment.loaded("local_compute") <= len(ASKED)
    wait_until(lambda: deployment.held() == [0] * 6)


def test_records_of_both_servers_are_on_one_page(deployment, tmp_path):
    """A request has one name on it; its prompt was computed before it was decoded."""
    folders = [deployment.folder / role for role in ROLES]
    for server in (deployment.prefill, deployment.decode):
        assert main(["record", str(server.port)]) == 0
    page = tmp_path / "both.html"
    assert main(["explain", *map(str, folders), "--html", str(page), "--no-step-pages"]) == 0
    run = read_run(*folders)
    assert [rank.title for rank in run.ranks] == [*ROLES] and page.is_file()
    computed, decoded = (rank.requests for rank in run.ranks)
    assert len(run.shared_requests) == len(ASKED) == len(computed)
    for name in run.shared_requests:
        assert all(span.in_prompt for span in computed[name].spans)
        ((_, tokens),) = decoded[name].hits
        assert tokens == computed[name].num_prompt_tokens - 1
        began = []
        for rank in run.ranks:
            step = rank.steps[rank.index.index(rank.requests[name].spans[0].first)]
            assert step.times is not None
            began.append(step.times[0])
        assert began[0] < began[1]


def test_a_benchmark_goes_through_the_proxy(deployment, tmp_path):
    found = bench(deployment.proxy, ASKED, tmp_path)
    assert (found["completed"], found["failed"]) == (len(ASKED), 0)


def test_errors_of_the_producer_reach_the_client(deployment):
    status, body = deployment.proxy.request("POST", COMPLETIONS, {"prompt": "a " * 4000})
    assert status == 400 and b"maximum context length" in body


def test_requests_that_can_not_be_divided_are_answered(deployment):
    """Several answers, several prompts, and what is no JSON, which the server refuses."""
    before = deployment.loaded()
    body: dict[str, Any] = {"prompt": ["one", "two"], "n": 2, "max_tokens": 2}
    status, answer = deployment.proxy.request("POST", COMPLETIONS, body)
    assert status == 200 and len(json.loads(answer)["choices"]) == 4
    connection = deployment.proxy.connect()
    connection.request("POST", COMPLETIONS, "{", JSON)
    assert connection.getresponse().status == 400
    assert deployment.loaded() == before


def test_a_producer_that_dies_costs_time_and_no_answer(deployment):
    """Prompts on their way are computed again, and those after it by the decoding server."""
    with ThreadPoolExecutor(len(ASKED)) as pool:
        asked = [pool.submit(deployment.proxy.chat, question) for question in ASKED]
        os.killpg(deployment.prefill.process.pid, signal.SIGKILL)
        for child in deployment.prefill.children:
            child.kill()
        assert [each.result() for each in asked] == [ANSWERS[question] for question in ASKED]
    assert answers(deployment.proxy) == [ANSWERS[question] for question in ASKED]
    wait_until(lambda: deployment.decode.held() == [0] * 3)
    assert re.search("can't be reached|is gone", deployment.proxy.log())
