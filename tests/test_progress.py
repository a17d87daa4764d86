"""What is said of waits, and what an API server does with requests while it drains."""

import asyncio
import json
import re
import threading
from types import SimpleNamespace

import numba
import pytest

from tests.helpers.waiting import LIMIT, until
from vllm_npu_prep import progress
from vllm_npu_prep.observe.violation import given_allowed
from vllm_npu_prep.server import one_line
from vllm_npu_prep.server.draining import (
    END_SECONDS,
    Drain,
    DrainMiddleware,
    cause_of_death,
    drain_and_shut_down,
)


@pytest.fixture
def hurried(monkeypatch):
    """What takes two seconds elsewhere takes a twentieth of one here."""
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(progress, "LARGEST_PAUSE", 0.2)


def test_a_wait_says_how_long_and_how_far_until_it_ends(monkeypatch):
    """Pauses double up to the largest, so that a long wait fills no log."""
    said, done, clock, over = [], iter(range(100)), SimpleNamespace(now=0.0), threading.Event()

    class Done:
        """Of a wait that ends after two minutes, by a clock that only pauses move."""

        def wait(self, pause: float) -> bool:
            clock.now += pause
            if clock.now >= 120:
                over.set()
            return over.is_set()

        def set(self) -> None:
            pass

    of_threads = SimpleNamespace(Event=Done, Thread=threading.Thread)
    monkeypatch.setattr(progress, "threading", of_threads)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    with progress.log_while_waiting("Baking", said.append, lambda: f"{next(done)} of 9"):
        assert over.wait(LIMIT)
    *during, last = said
    seconds = [2, 4, 8, 16, 32, 62, 92]
    assert during == [f"Baking: {each} s, {n} of 9 ..." for n, each in enumerate(seconds)]
    assert last == "Baking: 122 s in all"


def test_a_short_wait_is_not_worth_a_line():
    said = []
    with progress.log_while_waiting("Baking", said.append):
        pass
    assert said == []


def test_a_wait_that_fails_is_not_waited_for_any_longer(hurried):
    said = threading.Event()

    def burn() -> None:
        with progress.log_while_waiting("Baking", lambda line: said.set()):
            assert said.wait(LIMIT)
            raise OSError("burnt")

    with pytest.raises(OSError, match="burnt"):
        burn()
    assert not [each for each in threading.enumerate() if each.name == "npu_prep log_while_waiting"]


def test_code_that_is_compiled_is_counted_while_it_lasts(hurried):
    """A first start compiles for ten seconds and more; later ones load what it compiled."""
    functions = [numba.njit(lambda x, y=y: x * y + x**y) for y in range(24)]
    for expected in (True, False):
        said = []
        with progress.log_while_compiling(said.append):
            assert [function(3) for function in functions] == [3 * y + 3**y for y in range(24)]
        counts = [int(n) for line in said for n in re.findall(r", (\d+) functions so far", line)]
        assert (len(counts) > 1 and counts[-1] > counts[0]) == expected


class Client:
    """Asks an application of ours, without a server."""

    def __init__(self, drain: Drain):
        self.release = asyncio.Event()
        self.app = DrainMiddleware(self.serve, drain)

    async def serve(self, scope, receive, send):
        if scope["path"] == "/long":
            await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def ask(self, path: str, kind: str = "http") -> list[dict]:
        sent = []

        async def send(message):
            sent.append(message)

        await self.app({"type": kind, "path": path, "method": "POST"}, None, send)
        return sent


def test_draining_refuses_new_requests_and_waits_for_old_ones(hurried):
    drain, said = Drain(), []

    async def live():
        client = Client(drain)
        old = [asyncio.create_task(client.ask("/long")) for _ in range(2)]
        await asyncio.sleep(0)
        assert (await client.ask("/short"))[0]["status"] == 200
        assert drain.num_running == 2
        waited = asyncio.create_task(asyncio.to_thread(drain.wait, LIMIT, said.append))
        await until(lambda: drain.is_stopping)
        head, body = await client.ask("/health")
        assert head["status"] == 503
        assert (b"connection", b"close") in head["headers"]
        assert json.loads(body["body"])["error"]["code"] == 503
        assert (await client.ask("/realtime", "websocket"))[0]["type"] == "websocket.close"
        assert (await client.ask("/metrics"))[0]["status"] == 200
        await until(lambda: len(said) > 1)
        assert not waited.done()
        client.release.set()
        assert [each[0]["status"] for each in await asyncio.gather(*old)] == [200, 200]
        assert await waited

    asyncio.run(live())
    assert said[0] == f"Stopping: waiting up to {LIMIT} s for 2 requests to finish."
    assert re.fullmatch(r"Draining: \d+ s, 2 requests left, \d+ s left \.\.\.", said[1])
    assert re.fullmatch(r"Draining: \d+ s in all", said[-1])


def test_draining_ends_when_its_time_is_up_or_nothing_runs():
    drain, said = Drain(), []
    assert drain.wait(30, said.append)
    assert said == []

    async def live():
        client = Client(late)
        old = asyncio.create_task(client.ask("/long"))
        await asyncio.sleep(0)
        assert not await asyncio.to_thread(late.wait, 0.05, said.append)
        client.release.set()
        await old

    late = Drain()
    asyncio.run(live())
    assert said[-1] == "Aborting 1 request that did not finish within 0 s."


@pytest.mark.parametrize(("code", "name"), [(-9, "SIGKILL"), (-35, "signal 35")])
def test_the_signal_that_killed_an_engine_is_named(code, name):
    process = SimpleNamespace(name="EngineCore", exitcode=code)
    manager = SimpleNamespace(processes=[process], failed_proc_name="EngineCore")
    client = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))
    said = cause_of_death(SimpleNamespace(engine_core=client))
    assert said == f"EngineCore was killed by {name}"


def test_a_step_that_broke_a_rule_is_told_in_the_last_line(monkeypatch, tmp_path):
    """The refusal of a call is not told there, since no engine dies of it."""
    (file := tmp_path / "left").touch()
    monkeypatch.setenv(one_line.FILE_ENV_VAR, str(file))
    client = SimpleNamespace(resources=SimpleNamespace(engine_manager=None))
    engine = SimpleNamespace(engine_core=client)
    one_line.leave("wake-up: no tag weight; there are weights, kv_cache")
    assert cause_of_death(engine) == "the first error above says why"
    one_line.leave(said := str(given_allowed("table", "a slot is in its block", 147, 148)))
    assert cause_of_death(engine) == said


def test_an_engine_has_time_beside_that_of_its_workers(monkeypatch):
    """If it were killed while it waits for them, they would be killed with it."""
    monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "30")
    client = SimpleNamespace(resources=SimpleNamespace(engine_manager=object()))
    engine = SimpleNamespace(
        drain=Drain(), output_handler=None, output_processor=None, errored=False, engine_core=client
    )
    given = []

    def shut_down(engine, timeout):
        given.append(timeout)
        if len(given) == 1:  # while the first call waits, the server ends and calls again
            asyncio.run(again())

    async def again():
        drain_and_shut_down(engine, 3, shut_down, RuntimeError, print)

    drain_and_shut_down(engine, 60, shut_down, RuntimeError, print)
    assert given == [END_SECONDS + 30] * 2
