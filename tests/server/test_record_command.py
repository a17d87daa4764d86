"""`vllm-npu-prep record` beside servers that answer as an API server does, without an engine."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from tests.helpers.waiting import LIMIT
from vllm_npu_prep.cli import main
from vllm_npu_prep.server import record_client, record_command, record_server
from vllm_npu_prep.server.record_client import Address, server_of

WRITTEN = [
    {"rank": rank, "folder": f"/steps/{rank}", "steps": 64, "answer": f"64 steps are in {rank}"}
    for rank in range(2)
]
NOTHING = [{**rank, "steps": 0, "answer": "no new step to write"} for rank in WRITTEN]
RECORD = {"npu_prep": {"record": {"dir": "/steps"}}}


class Engine:
    """What the answers need of vLLM's `AsyncLLM`: two engines with a rank each."""

    def __init__(self, ranks: list[dict] | Exception, options: dict = RECORD) -> None:
        self.engine_core, self.ranks, self.asked = self, ranks, []
        self.vllm_config = SimpleNamespace(
            additional_config=options, model_config=SimpleNamespace(model="some/model")
        )

    async def call_utility_all_async(self, *call) -> list[list[dict]]:
        self.asked.append(call)
        if isinstance(self.ranks, Exception):
            raise self.ranks
        return [[rank] for rank in self.ranks]


def while_serving(engine: Engine, function) -> int:
    """What a function returns that runs while an engine's server answers."""

    async def serve():
        async with record_server.answering(engine, 8123):
            return await asyncio.to_thread(function)

    return asyncio.run(serve())


def here() -> Address:
    return Address(os.getpid(), os.getpid())


@pytest.fixture
def alone(monkeypatch):
    """As if no other server ran on this machine; returns what to find, in place of all."""
    found = [here()]
    monkeypatch.setattr(record_command, "addresses", lambda: found)
    return found


@pytest.mark.parametrize("words", [(), ("8123",), (str(os.getpid()),)], ids=["", "port", "pid"])
def test_the_records_of_all_ranks_are_written_and_named(alone, capsys, words):
    engine = Engine(WRITTEN)
    assert while_serving(engine, lambda: main(["record", *words])) == 0
    assert capsys.readouterr().out == "64 steps are in 0\n64 steps are in 1\n"
    assert engine.asked == [
        ("collective_rpc", "record_steps", None, ("vllm-npu-prep record",), None)
    ]


def test_json_has_the_folder_of_each_rank(alone, capsys):
    assert while_serving(Engine(WRITTEN), lambda: main(["record", "--json"])) == 0
    assert json.loads(capsys.readouterr().out) == {"pid": os.getpid(), "ranks": WRITTEN}


GONE = "the engine could not be asked: RuntimeError: gone, and so on"


@pytest.mark.parametrize(
    ("engine", "code", "said"),
    [
        (Engine(NOTHING), 1, "no new step to write\nno new step to write"),
        (Engine([WRITTEN[0], NOTHING[1]]), 0, "64 steps are in 0\nno new step to write"),
        (Engine(WRITTEN, {}), 2, "no steps are recorded: start with --additional-config"),
        (Engine(RuntimeError("gone,\nand so on")), 2, GONE),
    ],
    ids=["nothing new", "of one rank", "no records", "a dead engine"],
)
def test_what_keeps_records_from_being_written_is_told(alone, capsys, engine, code, said):
    assert while_serving(engine, lambda: main(["record"])) == code
    told = capsys.readouterr()
    # The server is in this process, and its log may be on standard error, too
    errors = [line for line in told.err.splitlines() if line.startswith("vllm-npu-prep: error: ")]
    assert said in told.out + "".join(errors) and len(errors) == (code == 2)


@pytest.mark.parametrize("seconds", ["nan", "-1", "0", "inf", "1e300", "soon"])
def test_a_time_that_is_none_is_refused(alone, capsys, seconds):
    with pytest.raises(SystemExit) as ended:
        main(["record", f"--timeout={seconds}"])
    assert ended.value.code == 2
    assert f"'{seconds}' is no number of seconds above 0" in capsys.readouterr().err


HANGS = "did not answer within 0.1 s: its engine is in a long step, or hangs; give a longer"


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (b"steps\n", 1, "no JSON object"),
        (b"[1]\n", 1, "no JSON object"),
        (b"{}\n", 2, "ranks"),
        (None, 1, HANGS),
    ],
)
def test_an_answer_of_another_kind_is_one_line(alone, capsys, answer, code, said):
    """And if none comes, or the server is gone by now."""
    alone[:] = [address := Address(os.getpid(), 1)]  # no process has this pair

    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.makefile("rb").readline()
            connection.sendall(answer)

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address.name)
        server.listen()
        if answer is not None:
            threading.Thread(target=serve, args=(server,)).start()
        assert main(["record", "--timeout", "0.1" if answer is None else str(LIMIT)]) == code
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert main(["record"]) == 1
    assert "Connection refused" in capsys.readouterr().err


def test_no_server_or_several_are_one_line(alone, capsys):
    alone.append(Address(1 << 30, 1))
    for words, expected in (
        ([], "2 servers run here; name one: "),
        (["77"], "no server has port or process 77; servers here: "),
    ):
        assert while_serving(Engine(WRITTEN), lambda words=words: main(["record", *words])) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"{expected}pid {os.getpid()}, port 8123: some/model; pid {1 << 30}" in error
    alone.clear()
    assert main(["record"]) == 2
    assert "no server with this plugin runs on this host" in capsys.readouterr().err


def test_a_server_is_found_from_any_of_its_processes():
    """Its own, those that it has started, and theirs; no others."""

    def look():
        script = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
        grandchild = "import os; print(os.getpid(), flush=True); input()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", script, "-c", grandchild]
        with subprocess.Popen(command, **pipes) as child:
            pid = int(child.stdout.readline())
            found = [server_of(each) for each in (os.getpid(), child.pid, pid, os.getppid())]
            child.communicate("\n")
        return found

    assert here() not in record_client.addresses()
    assert while_serving(Engine(WRITTEN), look) == [here()] * 3 + [None]
    assert here() not in record_client.addresses()


def test_another_user_is_not_answered(alone, capsys, monkeypatch):
    monkeypatch.setattr(record_server.os, "geteuid", lambda: 12345)
    monkeypatch.setattr(record_server, "ROOT", 54321)
    engine = Engine(WRITTEN)
    assert while_serving(engine, lambda: main(["record"])) == 1
    assert "gave no answer" in capsys.readouterr().err and not engine.asked


@pytest.mark.parametrize("words", [b"", b"\n", b"{}\n", b"[1]\n", b'{"ask": "record"}\n'])
def test_what_is_no_question_does_no_harm(words):
    """Neither to the server nor to the next who asks."""
    engine = Engine(WRITTEN)

    def send():
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(LIMIT)
            connection.connect(here().name)
            connection.sendall(words)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(10) == b""
        return record_client.ask(here(), "describe", LIMIT)

    assert while_serving(engine, send)["model"] == "some/model" and not engine.asked
