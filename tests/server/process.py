"""`vllm serve` as a process: started, asked, and ended."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tiny_model

from tests.helpers.waiting import LIMIT, wait_until

ROOT = Path(__file__).parents[2]
QUESTIONS = tiny_model.exchanges()
COMPLETIONS, CHAT, TOKENS = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
XGRAMMAR = '{"backend": "xgrammar", "disable_any_whitespace": true, "enable_in_reasoning": true}'
JSON = {"Content-Type": "application/json"}
ENDLESS = {"prompt": "one, two,", "ignore_eos": True, "temperature": 0}
"""A completion that is as long as it may be."""
FORKED = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
"""Of a server's environment: its engines and ranks don't import vLLM again, as they do when vLLM
spawns them, which it does unless told otherwise."""
FORCED = re.compile(r".*(?:sending SIGKILL|force killing remaining process).*")
"""What vLLM logs of a process that did not end by itself when it was told to."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """One `vllm serve` process and its log."""

    prefix: tuple[str, ...] = ()  # of its command
    start_seconds = 900  # on a machine that has other work; 15 to 30 without

    def __init__(
        self, model: Path, log: Path, *more_flags: str, port: int | None = None, **environment: str
    ):
        self.port, self.log_path, self.model = port or free_port(), log, str(model)
        vllm = Path(sys.executable).with_name("vllm")
        flags = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16"]
        flags += ["--max-num-batched-tokens", "64", *more_flags]
        command = [*self.prefix, str(vllm), "serve", str(model), "--port", str(self.port), *flags]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            )
        try:
            wait_until(self._is_up, self.start_seconds)
        except AssertionError:
            self.kill()
            raise AssertionError(f"the server did not start:\n{self.log()[-5000:]}") from None
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def _is_up(self) -> bool:
        assert self.process.poll() is None
        try:
            return self.request("GET", "/health")[0] == 200
        except OSError:
            return False

    def log(self) -> str:
        return self.log_path.read_text()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)

    def request(
        self, method: str, path: str, body: dict | None = None, **headers: str
    ) -> tuple[int, bytes]:
        connection = self.connect()
        try:
            payload = json.dumps(body) if body is not None else None
            connection.request(method, path, payload, JSON | headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def stream(self, connection: Any = None, **body: Any) -> http.client.HTTPConnection:
        """A connection on which a completion was asked for in pieces; nothing of it is read."""
        connection = connection or self.connect()
        connection.request("POST", COMPLETIONS, json.dumps(ENDLESS | {"stream": True} | body), JSON)
        return connection

    def complete(self, prompt: Any, engine: int | None = None, **params: Any) -> dict:
        """The one choice of a greedy completion, with its token ids."""
        body = {"prompt": prompt, "temperature": 0, "return_token_ids": True, **params}
        return self._choice(COMPLETIONS, body, engine)

    def choice(self, question: str, engine: int | None = None, **params: Any) -> dict:
        """The one choice of a greedy chat."""
        messages = [{"role": "user", "content": question}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 64, **params}
        return self._choice(CHAT, body, engine)

    def _choice(self, path: str, body: dict, engine: int | None) -> dict:
        headers = {} if engine is None else {"X-data-parallel-rank": str(engine)}
        status, answer = self.request("POST", path, body, **headers)
        assert status == 200, answer
        (choice,) = json.loads(answer)["choices"]
        return choice

    def chat(self, question: str, **params: Any) -> str:
        return self.choice(question, **params)["message"]["content"]

    def samples(self) -> Iterator[Any]:
        """What ``/metrics`` has: each with a name, labels and a value."""
        status, text = self.request("GET", "/metrics")
        assert status == 200
        for family in text_string_to_metric_families(text.decode()):
            yield from family.samples

    def metrics(self, engine: int = 0) -> dict[str, float]:
        """The plugin's samples of an engine: name and own labels, to value."""
        found = {}
        for sample in self.samples():
            labels = dict(sample.labels)
            of = labels.pop("engine", None), labels.pop("model_name", None)
            if sample.name.startswith("vllm:npu_prep_") and of == (str(engine), self.model):
                own = "".join(f" {key}={value}" for key, value in labels.items())
                found[sample.name.removeprefix("vllm:npu_prep_") + own] = sample.value
        return found

    def of_vllm(self) -> list[psutil.Process]:
        """Processes that vLLM has started, without helpers of Python's."""
        return [each for each in self.children if each.name().startswith("VLLM::")]

    def held(self) -> list[float]:
        """What vLLM's metrics say of requests that run or wait, and of the blocks they have."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        found = [each.value for each in self.samples() if each.name in {f"vllm:{n}" for n in names}]
        assert len(found) >= len(names)
        return found

    def left(self, *more: psutil.Process) -> list[psutil.Process]:
        """Those of its processes, and of others that belong to it, that do not end."""
        return psutil.wait_procs([*self.children, *more], timeout=LIMIT)[1]

    def forced(self) -> list[str]:
        """Lines of its log on processes that had to be killed."""
        return FORCED.findall(self.log())

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
