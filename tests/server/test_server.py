"""The real `vllm serve` with the plugin: requests of every kind, and a clean stop."""

import json
import random
import re
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoTokenizer

from tests.helpers.examples import run_client
from tests.helpers.huggingface import reference
from tests.helpers.lora import make_adapter, merge
from tests.helpers.prompts import prompts_of
from tests.helpers.waiting import LIMIT, wait_until
from tests.server import hostile
from tests.server.process import CHAT, COMPLETIONS, ENDLESS, QUESTIONS, XGRAMMAR, Server

DRAIN_SECONDS = 6  # of which the first two are not worth a line
SCHEMA = {
    "type": "object",
    "properties": {"group": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["group"],
    "additionalProperties": False,
}
FUNCTION = {"name": "free_blocks", "strict": True, "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.fixture(scope="module")
def server(demo_model, tmp_path_factory):
    server = Server(
        demo_model,
        tmp_path_factory.mktemp("server") / "log",
        *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"),
        "--enable-sleep-mode",
        *("--logits-processors", "tests.server.loaded:Spell", "tests.server.loaded:Slow"),
        *("--reasoning-parser", "granite"),  # plain text is an answer to it
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--structured-outputs-config", XGRAMMAR, "--shutdown-timeout", str(DRAIN_SECONDS)),
        VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
        VLLM_SERVER_DEV_MODE="1",
    )
    yield server
    server.kill()


@pytest.fixture(scope="module")
def tokenizer(demo_model):
    return AutoTokenizer.from_pretrained(demo_model)


def test_the_plugin_serves_what_the_model_learned(server):
    assert "device        CPU fallback" in server.log()
    assert [server.chat(question) for question, _ in QUESTIONS[:4]] == [a for _, a in QUESTIONS[:4]]


def test_the_openai_client_example_prints_the_text_in_chunks(server):
    question, answer = QUESTIONS[3]
    printed = run_client("openai_client.py", server.port, question)
    assert printed.startswith(f"user:      {question}\nassistant: {answer}\n\n")
    chunks, first, last = re.search(r"(\d+) chunks, .* (\S+) s, .* (\S+) s\n", printed).groups()
    assert int(chunks) > 5
    assert 0 < float(first) < float(last)
    assert f"\nas a whole: {answer}\n" in printed


def test_concurrent_requests_of_one_name_do_not_mix(server):
    """Twice as many as the engine runs at once, so that some wait.

    GHSA-2phq-3phc-84px: whoever sends a request chooses its identifier.
    """

    def ask(pair):
        body = {"messages": [{"role": "user", "content": pair[0]}], "temperature": 0}
        told = server.request("POST", CHAT, body, **{"X-Request-Id": "mine"})[1]
        return json.loads(told)["choices"][0]["message"]["content"]

    asked = [QUESTIONS[i % len(QUESTIONS)] for i in range(32)]
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(ask, asked)) == [answer for _, answer in asked]


@pytest.fixture(scope="module")
def spelled(server, tokenizer):
    """Function of a text: the choice of a chat in which the model was made to answer it."""

    def choice(text: str, index: int = 0, **params) -> dict:
        ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
        params = {"max_tokens": 120, "vllm_xargs": {"spell": ids}, **params}
        return server.choice(QUESTIONS[index][0], **params)

    return choice


def test_a_logits_processor_of_ones_own_among_plain_requests(server, spelled):
    wanted = "slots of the null block"

    def ask(index):
        if index % 2:
            return server.chat(QUESTIONS[index][0])
        return spelled(wanted, index)["message"]["content"]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert answers == [QUESTIONS[i][1] if i % 2 else wanted for i in range(8)]


def test_reasoning_is_told_from_the_answer(spelled):
    text = "Here is my thought process: blocks are pages. Here is my response: a slot."
    message = spelled(text)["message"]
    assert message["reasoning"].strip() == "blocks are pages."
    assert message["content"].strip() == "a slot."


def test_tools_are_called_and_answers_follow_a_schema(server, spelled):
    """By the model's own words, and by a grammar that leaves it no others."""
    text = '<tool_call>{"name": "free_blocks", "arguments": {"group": 3}}</tool_call>'
    choice = spelled(text, tools=[TOOL])
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "free_blocks"
    assert json.loads(call["function"]["arguments"]) == {"group": 3}
    named = {"type": "function", "function": {"name": "free_blocks"}}
    asked = {"tools": [TOOL], "tool_choice": named, "max_tokens": 200}
    (call,) = server.choice(QUESTIONS[0][0], **asked)["message"]["tool_calls"]
    assert call["function"]["name"] == "free_blocks"
    answer = server.complete("one, two,", max_tokens=60, structured_outputs={"json": SCHEMA})
    for forced in (call["function"]["arguments"], answer["text"]):
        value = json.loads(forced)
        assert list(value) == ["group"] and value["group"] in range(10)


def test_a_reset_of_the_prefix_cache_and_a_sleep(server):
    question, answer = QUESTIONS[2]
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


@pytest.mark.parametrize("request_", hostile.HOSTILE, ids=[each[0] for each in hostile.HOSTILE])
def test_a_hostile_request_is_answered_and_nobody_else_notices(sent, request_):
    """Refused in one line, or served; others get their tokens beside it."""
    status, told, others = sent[request_.advisory].result()
    assert status in request_.statuses, told
    assert others == QUESTIONS[4][1]
    if status != 200:
        assert told["error"]["code"] == status and told["error"]["message"]
        assert not re.search("Traceback|EngineCore", told["error"]["message"])


def test_clients_that_hang_up_leave_the_server_well(server, seed):
    """Before an answer begins, in its midst, and while they wait for their turn."""
    (question, answer), rng, connections = QUESTIONS[7], random.Random(seed), []
    for number in range(24):  # the engine runs 16
        connections.append(server.stream(max_tokens=400))
        if number < 8:
            connections[-1].getresponse().read(20)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.chat, question)
        while connections:
            connections.pop(rng.randrange(len(connections))).close()
            time.sleep(rng.random() / 20)
        assert other.result() == answer
    wait_until(lambda: not any(server.held()))
    assert server.chat(question) == answer


def test_a_client_that_reads_slowly_gets_all_and_delays_nobody(server):
    """Its buffers are small, and it reads nothing until others have been served."""
    body = {**ENDLESS, "max_tokens": 150, "logprobs": 5}  # a piece is some hundred bytes
    expected = json.loads(server.request("POST", COMPLETIONS, body)[1])["choices"][0]["text"]
    connection = server.connect()
    connection.sock = socket.socket()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sock.settimeout(LIMIT)
    connection.sock.connect(("127.0.0.1", server.port))
    server.stream(connection, **body)
    assert [server.chat(question) for question, _ in QUESTIONS[:4]] == [a for _, a in QUESTIONS[:4]]
    wait_until(lambda: not any(server.held()))
    *pieces, end, _ = connection.getresponse().read().decode().split("\n\n")
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
    expected = {"base": reference(demo_model, prompts, 8)}
    for name, folder in folders.items():
        merged = merge(demo_model, folder, tmp_path / f"m-{name}")
        expected[name] = reference(merged, prompts, 8)
    assert len({tuple(tokens[0]) for tokens in expected.values()}) == 4

    def load(name: str, folder, **settings) -> int:
        body = {"lora_name": name, "lora_path": str(folder), **settings}
        return server.request("POST", "/v1/load_lora_adapter", body)[0]

    def complete(name: str, prompt: list[int]) -> list[int]:
        model = {} if name == "base" else {"model": name}
        return server.complete(prompt, max_tokens=8, ignore_eos=True, **model)["token_ids"]

    def weights_of(*names: str) -> list[str | None]:
        """Whose weights each name has, by what requests that run at once get."""
        asked = [(name, prompt) for prompt in prompts for name in names] * 2
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(lambda pair: complete(*pair), asked))
        rows = [answers[index :: len(names)] for index in range(len(names))]
        return [next((of for of, e in expected.items() if row == e * 2), None) for row in rows]

    assert load("first", folders["first"]) == 200
    assert load("second", folders["second"]) == 200
    assert load("nowhere", tmp_path / "nowhere") == 404
    assert weights_of("base", "first", "second") == ["base", "first", "second"]
    assert load("third", folders["third"]) == 200
    names = ["base", "first", "second", "third"]
    assert weights_of(*names) == names
    for name in ("first", "second"):
        assert server.request("POST", "/v1/unload_lora_adapter", {"lora_name": name})[0] == 200
    gone = {"model": "first", "prompt": prompts[0]}
    assert server.request("POST", COMPLETIONS, gone)[0] == 404
    assert load("first", folders["second"]) == 200, "the name is free for other weights"
    assert weights_of("base", "first", "third") == ["base", "second", "third"]
    shutil.copytree(folders["third"], folders["second"], dirs_exist_ok=True)
    assert load("first", folders["second"], load_inplace=True) == 200
    assert weights_of("base", "first", "third") == ["base", "third", "third"]
    shutil.copytree(folders["first"], folders["second"], dirs_exist_ok=True)
    assert weights_of("base", "first") == ["base", "third"]  # nobody asked to load it


def test_a_server_that_is_told_to_stop_drains(server):
    """By Ctrl-C: it ends what ends in time, tells of progress, and refuses what is new."""
    slow = {"vllm_xargs": {"seconds": 0.15}}  # of two requests in a step
    short, long = (server.stream(max_tokens=n, **slow).getresponse() for n in (10, 400))
    assert short.read(20) and long.read(20)
    before, began = len(server.log()), time.monotonic()
    server.process.send_signal(signal.SIGINT)
    wait_until(lambda: server.request("GET", "/health")[0] == 503)
    refused, told = server.request("POST", COMPLETIONS, {**ENDLESS, "max_tokens": 4})
    assert (refused, json.loads(told)["error"]["code"]) == (503, 503)
    assert server.request("GET", "/metrics")[0] == 200
    rest = short.read()
    assert rest.count(b'"finish_reason":"length"') == 1
    assert rest.rstrip().endswith(b"data: [DONE]")
    rest = long.read()
    assert b"error" in rest and b"DONE" not in rest[: rest.find(b"error")]
    assert time.monotonic() - began > DRAIN_SECONDS - 0.5
    assert server.process.wait(LIMIT) == 0
    assert server.left() == []
    log = server.log()[before:]
    for line in (
        f"Stopping: waiting up to {DRAIN_SECONDS} s for 2 requests to finish.",
        "s, 1 request left, ",
        f"Aborting 1 request that did not finish within {DRAIN_SECONDS} s.",
    ):
        assert line in log
    assert server.forced() == []
    assert [word for word in ("Traceback", "ERROR", "leaked") if word in log] == []
