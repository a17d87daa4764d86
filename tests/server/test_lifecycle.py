"""A server that loses a process: its records and metrics before, how it ends, and what stays."""

import contextlib
import http.client
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.helpers.waiting import LIMIT
from tests.server.process import COMPLETIONS, ENDLESS, FORKED, QUESTIONS, Server, free_port
from vllm_npu_prep.cli import main
from vllm_npu_prep.observe.metrics import FOLDER_ENV_VAR, SHARED_ENV_VAR

CLIENTS = 6
ERROR = "vllm_npu_prep: error: "


class Loss(NamedTuple):
    """A server, and what is killed of it."""

    flags: tuple[str, ...]
    killed: str  # how its name begins; "" of the main process
    why: str  # what the log says of it
    engines: int = 1
    ranks: int = 1  # of all engines


LOST = {
    "worker": Loss(
        ("--tensor-parallel-size", "2"),
        "VLLM::Worker_TP1",
        "Worker proc VllmWorker-1 died unexpectedly",
        ranks=2,
    ),
    "engine": Loss((), "VLLM::EngineCore", "EngineCore was killed by SIGKILL"),
    "one of two engines": Loss(
        ("--data-parallel-size", "2", "--api-server-count", "1"),
        "VLLM::EngineCore_DP1",
        f"{ERROR}the engine died",
        engines=2,
        ranks=2,
    ),
    "API server": Loss(("--api-server-count", "2"), "VLLM::APIServer_1", "ApiServer_1"),
    "main process": Loss(
        ("--tensor-parallel-size", "2", "--api-server-count", "2"),
        "",
        "stops: the process that started it",
        ranks=2,
    ),
}


@pytest.fixture(scope="module")
def port():
    """Of all servers here, one after another."""
    return free_port()


@pytest.fixture(scope="module", params=LOST.values(), ids=LOST)
def loss(request):
    return request.param


@pytest.fixture(scope="module")
def server(loss, demo_model, port, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lost")
    config = json.dumps({"npu_prep": {"record": {"dir": str(folder / "records")}}})
    flags = ("--enforce-eager", "--additional-config", config, *loss.flags)
    # What a forked engine counts in is not in the environment that others see of it.
    quick = FORKED if loss is LOST["worker"] else {}
    server = Server(demo_model, folder / "log", *flags, port=port, **quick)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def sampled():
    """What the first of the servers answered to requests with a seed."""
    return []


def test_answers_are_those_of_the_server_before(server, loss, sampled):
    """Also those with a seed, here to a long prompt, which is computed in chunks."""
    (question, answer), long = QUESTIONS[0], " ".join(question for question, _ in QUESTIONS)
    seeded = {"temperature": 2.0, "seed": 7, "return_token_ids": True, "max_tokens": 16}
    for engine in range(loss.engines):
        assert server.choice(question, engine)["message"]["content"] == answer
        sampled.append(server.choice(long, engine, **seeded)["token_ids"])
        assert sampled[-1] == sampled[0]


def test_a_step_of_all_ranks_is_counted_once(server, loss):
    """By the engine that was asked; others know nothing of it."""

    def steps() -> list[float]:
        samples = map(server.metrics, range(loss.engines))
        return [each.get("prepare_time_seconds_count", 0) for each in samples]

    before = steps()
    server.complete([*range(40, 53)], loss.engines - 1, max_tokens=4, ignore_eos=True)
    counted = [now - was for now, was in zip(steps(), before)]
    assert counted == [0] * (loss.engines - 1) + [4]


def test_all_ranks_write_records_if_any_process_is_named(server, loss):
    """Of what each has prepared since the last time."""
    records = server.log_path.parent / "records"

    def written() -> dict[Path, int]:
        # The first of several engines does not know of others, and its folder has no rank.
        folders = {each.parent for each in records.glob("*/step-*")}
        return {each: len([*each.glob("step-*")]) for each in folders}

    for pid in (server.process.pid, *(each.pid for each in server.of_vllm())):
        before = written()
        for engine in range(loss.engines):
            assert server.choice(QUESTIONS[0][0], engine)["message"]["content"] == QUESTIONS[0][1]
        assert main(["record", str(pid)]) == 0
        now = written()
        assert len(now) == loss.ranks
        assert all(now[each] > before.get(each, 0) for each in now)


def shared_by(server: Server) -> set[Path]:
    """Shared memory that its processes have mapped, and the folder that they count steps in."""
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
def asking(server: Server, prompts: list[str], seed: int) -> Iterator[tuple[list, list]]:
    """Several clients ask until the server ends, which the block is to see to.

    Gives prompts with the tokens of their answers, and what errors said. The block runs once all
    clients have had answers.
    """
    answers: list[tuple[str, list[int]]] = []
    errors: list[str] = []
    served, over = threading.Semaphore(0), threading.Event()

    def client(number: int) -> None:
        rng = random.Random(seed + number)
        while not over.is_set():
            body = {**ENDLESS, "max_tokens": 8, "return_token_ids": True}
            body["prompt"] = prompt = rng.choice(prompts)
            try:
                status, told = server.request("POST", COMPLETIONS, body)
            except (OSError, http.client.HTTPException) as error:
                return errors.append(type(error).__name__)
            if status != 200:
                return errors.append(f"{status} {json.loads(told)['error']['message']}")
            (choice,) = json.loads(told)["choices"]
            if choice["finish_reason"] == "abort":  # of another engine, which vLLM stops
                return errors.append("abort")
            answers.append((prompt, choice["token_ids"]))
            served.release()

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            for _ in range(2 * CLIENTS):
                assert served.acquire(timeout=LIMIT)
            yield answers, errors
            for each in clients:
                each.result(timeout=LIMIT)
        finally:  # where the block failed, the server goes on, and so would they
            over.set()


def test_a_server_that_loses_a_process_under_load_ends(server, loss, seed):
    """No answer is wrong, each client hears of it, nothing is left, and nobody has its port."""
    prompts = [question for question, _ in QUESTIONS[:6]]
    asked = {"max_tokens": 8, "ignore_eos": True}
    expected = {prompt: server.complete(prompt, **asked)["token_ids"] for prompt in prompts}
    shared = shared_by(server)
    victim = server.process
    if loss.killed:
        (victim,) = (each for each in server.children if each.name().startswith(loss.killed))
    with asking(server, prompts, seed) as (answers, errors):
        time.sleep(random.Random(f"{seed} {loss.killed}").random())
        victim.kill()
        code = server.process.wait(LIMIT)
    assert server.left() == []
    assert len(errors) == CLIENTS, "each client heard of it"
    assert not any("Traceback" in each for each in errors)
    assert [tokens for _, tokens in answers] == [expected[prompt] for prompt, _ in answers]
    log = server.log()
    assert loss.why in log
    if loss.killed:
        # Of an API server that is gone vLLM's main process tells, in its own words.
        assert (code, log.count(ERROR)) == (1, int("APIServer" not in loss.killed))
    # A main process that is killed can't remove its folder, in which the next one doesn't look.
    left = {path for path in shared if path.exists() and (loss.killed or "/dev/shm" in str(path))}
    assert shared and left == set()
