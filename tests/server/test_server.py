"""The real `vllm serve` with the plugin: requests of every kind, and a clean stop."""

import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tiny_model

from tests.helpers.examples import run_client
from tests.helpers.huggingface import reference
from tests.helpers.lora import make_adapter, merge
from tests.helpers.prompts import prompts_of
from tests.helpers.waiting import LIMIT, wait_until
from tests.server.hostile import CHAT, COMPLETIONS, HOSTILE

ROOT = Path(__file__).parents[2]
QUESTIONS = tiny_model.exchanges()
XGRAMMAR = '{"backend": "xgrammar", "disable_any_whitespace": true, "enable_in_reasoning": true}'
PARSERS = [
    *("--logits-processors", "tests.helpers.spelling:Spell"),
    *("--reasoning-parser", "granite"),  # plain text is an answer to it
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--structured-outputs-config", XGRAMMAR),
]
TOOL = {
    "type": "function",
    "function": {
        "name": "free_blocks",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"group": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["group"],
            "additionalProperties": False,
        },
    },
}


FORCED = re.compile(r"sending SIGKILL|force killing remaining process")
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
        self.port, self.log_path, self.model_name = port or free_port(), log, str(model)
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
            headers = {"Content-Type": "application/json", **headers}
            connection.request(method, path, payload, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def choice(self, question: str, engine: int | None = None, **params) -> dict:
        messages = [{"role": "user", "content": question}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 64, **params}
        headers = {} if engine is None else {"X-data-parallel-rank": str(engine)}
        status, answer = self.request("POST", "/v1/chat/completions", body, **headers)
        assert status == 200, answer
        return json.loads(answer)["choices"][0]

    def chat(self, question: str, **params) -> str:
        return self.choice(question, **params)["message"]["content"]

    def metrics(self, engine: int = 0) -> dict[str, float]:
        """The plugin's samples of an engine at ``/metrics``: name and own labels, to value."""
        status, text = self.request("GET", "/metrics")
        assert status == 200
        samples = {}
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                if sample.name.startswith("vllm:npu_prep_"):
                    labels = dict(sample.labels)
                    if labels.pop("engine") != str(engine):
                        continue
                    assert labels.pop("model_name") == self.model_name
                    own = "".join(f" {key}={value}" for key, value in labels.items())
                    name = sample.name.removeprefix("vllm:npu_prep_") + own
                    samples[name] = sample.value
        return samples

    def stop(self, signum: int) -> int:
        """Its exit code. That of a server which had to kill an engine or a rank is 0, too."""
        self.process.send_signal(signum)
        code = self.process.wait(LIMIT)
        assert not (found := [line for line in self.log().splitlines() if FORCED.search(line)]), (
            found
        )
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def server(demo_model, tmp_path_factory):
    server = Server(
        demo_model,
        tmp_path_factory.mktemp("server") / "log",
        *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"),
        *("--enable-sleep-mode", "--worker-extension-cls", "tests.helpers.failing.WithoutRoom"),
        *PARSERS,
        VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
        VLLM_SERVER_DEV_MODE="1",
    )
    yield server
    server.kill()


@pytest.fixture(scope="module")
def tokenizer(demo_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model)


def test_the_plugin_is_what_serves(server):
    assert "device        CPU fallback" in server.log()
    assert server.request("GET", "/health")[0] == 200


@pytest.mark.parametrize("index", [0, 5, 12, -1])
def test_chat_answers_what_the_model_learned(server, index):
    question, answer = QUESTIONS[index]
    assert server.chat(question) == answer


def test_metrics_count_each_step_as_it_was_prepared(server):
    """Two prompts in turn; the first is padded to a graph of 16 tokens, the second exceeds 32."""
    prompts, num_tokens = [[*range(40, 53)], [*range(60, 97)]], 6
    before = server.metrics()
    for prompt in prompts:
        body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        assert server.request("POST", "/v1/completions", body)[0] == 200
    after = server.metrics()
    counted = {name: after[name] - before.get(name, 0) for name in after}
    seconds = counted.pop("prepare_time_seconds_sum")
    buckets = [v for name, v in counted.items() if name.startswith("prepare_time_seconds_bucket")]
    steps, decodes = len(prompts) * num_tokens, len(prompts) * (num_tokens - 1)
    assert {name: value for name, value in counted.items() if value and "bucket" not in name} == {
        "steps_total attn_state=PrefillNoCache": len(prompts),
        "steps_total attn_state=DecodeOnly": decodes,
        "graph_steps_total graph=piecewise graphs": 1,
        "graph_steps_total graph=full graph": decodes,
        "eager_steps_total reason=more than 32 tokens, the largest capture size": 1,
        "tokens_total": sum(map(len, prompts)) + decodes,
        "padding_tokens_total": 16 - len(prompts[0]),
        "prepare_time_seconds_count": steps,
    }
    assert after["staging_waits_total"] == 0
    assert buckets == sorted(buckets) and buckets[-1] == steps
    assert 0 < seconds < 60


def test_completion(server):
    body = {"prompt": "<|im_start|>user\nCount to ten.<|im_end|>\n<|im_start|>assistant\none, two,"}
    status, answer = server.request(
        "POST", "/v1/completions", {**body, "temperature": 0, "max_tokens": 40}
    )
    assert status == 200
    text = json.loads(answer)["choices"][0]["text"]
    assert text.strip().startswith("three, four, five")


def test_the_openai_client_example_prints_the_same_text_in_pieces(server):
    question, answer = QUESTIONS[3]
    printed = run_client("openai_client.py", server.port, question)
    assert printed.startswith(f"user:      {question}\nassistant: {answer}\n\n")
    pieces, first, last = re.search(r"(\d+) pieces, .* (\S+) s, .* (\S+) s\n", printed).groups()
    assert int(pieces) > 5
    assert 0 < float(first) < float(last)
    assert f"\nas a whole: {answer}\n" in printed


def test_thirty_two_concurrent_requests_do_not_mix(server):
    """Twice as many as the engine runs at once, so that some wait."""
    asked = [QUESTIONS[i % len(QUESTIONS)] for i in range(32)]
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda pair: server.chat(pair[0]), asked))
    assert answers == [answer for _, answer in asked]


def test_a_seeded_prompt_longer_than_the_budget_does_not_end_the_server(server):
    body = {"prompt": "one, two, " * 60, "max_tokens": 5, "temperature": 1.0, "seed": 1}
    answers = [server.request("POST", "/v1/completions", body) for _ in range(2)]
    texts = [json.loads(answer)["choices"][0]["text"] for status, answer in answers]
    assert texts[0] == texts[1]


def test_what_logits_processors_of_vllm_do_to_an_answer(server, tokenizer):
    question, answer = QUESTIONS[0]
    plain = server.choice(question, return_token_ids=True)["token_ids"]
    first, last = plain[0], tokenizer.eos_token_id
    assert plain[-1] == last
    # Nothing but the likeliest token is left at any temperature.
    assert server.chat(question, temperature=2.0, min_p=1.0, seed=3) == answer
    assert server.chat(question, temperature=2.0, seed=3) != answer

    def token_ids(**params):
        return server.choice(question, return_token_ids=True, **params)["token_ids"]

    other = plain[1] if plain[1] != first else plain[2]
    assert token_ids(logit_bias={str(other): 100}, max_tokens=5) == [other] * 5
    assert token_ids(logit_bias={str(first): -100})[0] != first
    longer = token_ids(min_tokens=len(plain) + 5)
    assert longer[: len(plain) - 1] == plain[:-1]
    assert len(longer) >= len(plain) + 5
    allowed = [first, other, *tokenizer.encode(" of")]
    only = token_ids(allowed_token_ids=allowed, max_tokens=12)
    assert only[0] == first
    assert set(only) <= set(allowed)
    word = answer.split()[2]
    without = server.chat(question, bad_words=[word, " " + word])
    assert f" {word} " in answer
    assert without != answer
    assert f" {word} " not in without
    assert server.chat(question) == answer  # nothing of it stays behind


def test_a_logits_processor_of_one_s_own_among_plain_requests(server, tokenizer):
    wanted = "slots of the null block"
    spelled = [*tokenizer.encode(wanted), tokenizer.eos_token_id]

    def ask(index):
        if index % 2:
            return server.chat(QUESTIONS[index][0])
        return server.chat(QUESTIONS[index][0], vllm_xargs={"spell": spelled})

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert answers == [QUESTIONS[i][1] if i % 2 else wanted for i in range(8)]


def spelled_choice(server, tokenizer, text: str, **params) -> dict:
    """An answer that the model was made to give."""
    spelled = [*tokenizer.encode(text), tokenizer.eos_token_id]
    params = {"max_tokens": 120, **params}
    return server.choice(QUESTIONS[0][0], vllm_xargs={"spell": spelled}, **params)


def test_reasoning_is_told_from_the_answer(server, tokenizer):
    text = "Here is my thought process: blocks are pages. Here is my response: a slot."
    message = spelled_choice(server, tokenizer, text)["message"]
    assert message["reasoning"].strip() == "blocks are pages."
    assert message["content"].strip() == "a slot."


def test_tools_are_called(server, tokenizer):
    """By the model's own words, and by a grammar that leaves it no others."""
    text = '<tool_call>{"name": "free_blocks", "arguments": {"group": 3}}</tool_call>'
    choice = spelled_choice(server, tokenizer, text, tools=[TOOL])
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "free_blocks"
    assert json.loads(call["function"]["arguments"]) == {"group": 3}
    named = {"type": "function", "function": {"name": "free_blocks"}}
    asked = {"tools": [TOOL], "tool_choice": named, "max_tokens": 200}
    (call,) = server.choice(QUESTIONS[0][0], **asked)["message"]["tool_calls"]
    assert call["function"]["name"] == "free_blocks"
    (group,) = json.loads(call["function"]["arguments"]).values()
    assert 0 <= group <= 9


def test_an_answer_is_forced_into_a_schema(server):
    schema = TOOL["function"]["parameters"]
    body = {"prompt": "one, two,", "max_tokens": 60, "temperature": 0}
    body["structured_outputs"] = {"json": schema}
    status, answer = server.request("POST", "/v1/completions", body)
    assert status == 200, answer
    value = json.loads(json.loads(answer)["choices"][0]["text"])
    assert list(value) == ["group"]
    assert 0 <= value["group"] <= 9


def test_a_reset_of_the_prefix_cache_and_a_sleep(server):
    question, answer = QUESTIONS[2]
    body = {"prompt": "one, two,", "max_tokens": 400, "ignore_eos": True, "stream": True}
    connection = server.connect()
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    response.read(20)
    path = "/reset_prefix_cache?reset_running_requests=true"
    assert server.request("POST", path) == (200, b'{"success":true}')
    assert server.chat(question) == answer
    assert b"[DONE]" in response.read()
    connection.close()
    assert server.request("POST", "/reset_prefix_cache") == (200, b'{"success":true}')
    for path, asleep in [
        ("/sleep?level=1", True),
        ("/wake_up?tags=weights", True),
        ("/wake_up?tags=kv_cache", False),
        ("/sleep?level=0", True),
        ("/wake_up", False),
    ]:
        assert server.request("POST", path)[0] == 200
        status, told = server.request("GET", "/is_sleeping")
        assert (status, json.loads(told)) == (200, {"is_sleeping": asleep})
    assert server.chat(question) == answer


def test_a_wake_up_without_memory_is_one_line_and_the_server_sleeps_on(server):
    """To the client and in the log."""
    question, answer = QUESTIONS[3]
    before = len(server.log())
    assert server.request("POST", "/sleep?level=1")[0] == 200
    assert server.request("POST", "/collective_rpc", {"method": "take_room"})[0] == 200
    for _ in range(2):
        status, told = server.request("POST", "/wake_up")
        message = json.loads(told)["error"]["message"]
        assert status == 500 and "\n" not in message
        assert "wake-up: no memory for" in message and "still asleep" in message
        assert server.request("GET", "/is_sleeping") == (200, b'{"is_sleeping":true}')
        assert server.request("GET", "/health")[0] == 200
    logged = server.log()[before:]
    assert "wake-up: no memory for" in logged and "Traceback" not in logged
    assert server.request("POST", "/collective_rpc", {"method": "give_room"})[0] == 200
    assert server.request("POST", "/wake_up")[0] == 200
    assert server.chat(question) == answer


@pytest.mark.parametrize("hostile", HOSTILE, ids=[each.advisory for each in HOSTILE])
def test_a_hostile_request_is_answered_and_nobody_else_notices(server, hostile):
    """Refused in one line, or served; others get their tokens, beside it and after it."""
    question, answer = QUESTIONS[4]
    message = {"role": "user", "content": question}
    chat = hostile.path == CHAT
    body = {"messages": [message]} if chat else {"prompt": "one, two,"}
    body |= {"temperature": 0, "max_tokens": 4, **hostile.body}
    body = {name: value for name, value in body.items() if value is not None}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.chat, question)
        status, told = server.request("POST", hostile.path, body, **hostile.headers)
        assert other.result() == answer
    assert status in hostile.statuses, told
    if status != 200:
        error = json.loads(told)["error"]
        assert error["code"] == status and error["message"]
        assert "Traceback" not in error["message"] and "EngineCore" not in error["message"]
    assert server.chat(question) == answer


def test_requests_of_one_name_are_not_mixed(server):
    """GHSA-2phq-3phc-84px: whoever sends a request chooses its identifier."""
    asked = [QUESTIONS[i % len(QUESTIONS)] for i in range(8)]

    def ask(pair):
        body = {"messages": [{"role": "user", "content": pair[0]}], "temperature": 0}
        body |= {"max_tokens": 64}
        headers = {"X-Request-Id": "mine"}
        status, told = server.request("POST", CHAT, body, **headers)
        assert status == 200, told
        return json.loads(told)["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, asked)) == [answer for _, answer in asked]


def held_by_requests(server) -> dict[str, float]:
    """What vLLM's metrics say of requests that run or wait, and of the blocks they have."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    lines = server.request("GET", "/metrics")[1].decode().splitlines()
    found = [line for line in lines if line.startswith(tuple(f"vllm:{n}{{" for n in names))]
    assert len(found) >= len(names)
    return {line: float(line.rpartition(" ")[2]) for line in found}


def test_clients_that_hang_up_leave_the_server_well(server, seed):
    """At any moment: before an answer begins, in its midst, and while they wait for their turn."""
    rng, connections = random.Random(seed), []
    body = {"prompt": "one, two,", "max_tokens": 400, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json"}
    question, answer = QUESTIONS[7]
    for number in range(24):  # the engine runs 16
        connection = server.connect()
        connection.request("POST", COMPLETIONS, json.dumps(body), headers)
        if number < 8:
            connection.getresponse().read(20)
        connections.append(connection)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.chat, question)
        while connections:
            connections.pop(rng.randrange(len(connections))).close()
            time.sleep(rng.random() / 20)
        assert other.result() == answer
    wait_until(lambda: not any(held_by_requests(server).values()))
    assert server.chat(question) == answer


def test_a_client_that_reads_slowly_gets_the_whole_answer_and_delays_nobody(server):
    """Its buffers are small, and it reads nothing until others have been served."""
    body = {"prompt": "one, two,", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    body |= {"logprobs": 5}  # which makes each piece some hundred bytes
    expected = json.loads(server.request("POST", COMPLETIONS, body)[1])["choices"][0]["text"]
    headers = {"Content-Type": "application/json"}
    connection = server.connect()
    connection.sock = socket.socket()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sock.settimeout(LIMIT)
    connection.sock.connect(("127.0.0.1", server.port))
    try:
        connection.request("POST", COMPLETIONS, json.dumps({**body, "stream": True}), headers)
        for question, answer in QUESTIONS[:4]:
            assert server.chat(question) == answer
        wait_until(lambda: not any(held_by_requests(server).values()))
        *pieces, end, _ = connection.getresponse().read().decode().split("\n\n")
    finally:
        connection.close()
    assert end == "data: [DONE]"
    choices = [json.loads(piece.removeprefix("data: "))["choices"][0] for piece in pieces]
    assert "".join(choice["text"] for choice in choices) == expected
    assert choices[-1]["finish_reason"] == "length"


def test_adapters_come_and_go_while_the_server_runs(server, demo_model, tmp_path, seed):
    prompts = prompts_of(seed, [9, 30, 70])
    folders = {
        name: make_adapter(tmp_path / name, demo_model, seed=seed + index, spread=0.1)
        for index, name in enumerate(("first", "second", "third"))
    }
    merged = {
        name: merge(demo_model, each, tmp_path / f"m-{name}") for name, each in folders.items()
    }
    expected = {name: reference(folder, prompts, 8) for name, folder in merged.items()}
    expected["base"] = reference(demo_model, prompts, 8)
    assert len({tuple(tokens[0]) for tokens in expected.values()}) == 4

    def load(name: str, folder: Path, **settings) -> int:
        body = {"lora_name": name, "lora_path": str(folder), **settings}
        return server.request("POST", "/v1/load_lora_adapter", body)[0]

    def complete(name: str, prompt: list[int]) -> tuple[int, list[int]]:
        body = {"model": str(demo_model) if name == "base" else name, "prompt": prompt}
        body |= {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
        status, answer = server.request("POST", "/v1/completions", body)
        return status, json.loads(answer)["choices"][0]["token_ids"] if status == 200 else []

    def check(weights: dict[str, str]) -> None:
        """`weights`: whose weights a name ought to have."""
        asked = [(name, index) for index in range(len(prompts)) for name in weights] * 2
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(lambda pair: complete(pair[0], prompts[pair[1]]), asked))
        assert answers == [(200, expected[weights[name]][index]) for name, index in asked]

    assert load("first", folders["first"]) == 200
    assert load("second", folders["second"]) == 200
    assert load("nowhere", tmp_path / "nowhere") == 404
    check({"base": "base", "first": "first", "second": "second"})
    assert load("third", folders["third"]) == 200
    check({"base": "base", "first": "first", "second": "second", "third": "third"})
    for name in ("first", "second"):
        body = {"lora_name": name}
        assert server.request("POST", "/v1/unload_lora_adapter", body)[0] == 200
    assert complete("first", prompts[0])[0] == 404
    assert load("first", folders["second"]) == 200, "the name is free for other weights"
    check({"base": "base", "first": "second", "third": "third"})
    shutil.copytree(folders["third"], folders["second"], dirs_exist_ok=True)
    assert load("first", folders["second"], load_inplace=True) == 200
    check({"base": "base", "first": "third", "third": "third"})
    shutil.copytree(folders["first"], folders["second"], dirs_exist_ok=True)
    check({"base": "base", "first": "third"})  # nobody asked to load it


def check_all_gone(server: Server, *more: psutil.Process) -> None:
    """No process of the server is left, nor of others that belong to it."""
    began = time.monotonic()
    _, alive = psutil.wait_procs([*server.children, *more], timeout=LIMIT)
    assert not alive, f"left behind: {alive}"
    print(f"the last of its processes ended after {time.monotonic() - began:.1f} s")


def check_clean_stop(server: Server, signum: int | None = None) -> None:
    """Without a signal: the server has had one."""
    code = server.process.wait(LIMIT) if signum is None else server.stop(signum)
    assert code == 0, server.log()[-3000:]
    log = server.log()
    assert "Traceback" not in log
    assert "ERROR" not in log
    assert "leaked" not in log
    check_all_gone(server)


def test_the_serve_example_prints_the_answer_and_exits(demo_model):
    command = [sys.executable, "examples/serve.py", "--once", "--port", str(free_port())]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert run.returncode == 0, run.stderr[-3000:]
    answer = dict(QUESTIONS)["What is a slot mapping?"]
    assert f"assistant: {answer}" in run.stdout
