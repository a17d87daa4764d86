"""Random faults of transfers: prompts that an engine computes and decodes over Mooncake.

    python -m tests.soak.transfers [--minutes 30] [--fresh] [--retry]
    python -m tests.soak.transfers --seed N [--episodes N]

An engine of each seed sends to itself, by the stand-in of `tests.helpers.mooncake`. Transfers are
torn, late, stalled until long after they were given up, or end with their producer; other engines
ask for a prompt and die before, while or after it is sent; requests are aborted on either side, or
asked for though nobody computes them; the cache is full now and then.
Each answer is that of transformers, or one error where errors are asked for. After each wave all
blocks are free again.

Without a seed: a slice of the run in tests/results/soak-transfers.jsonl; a seed that fails is
appended to tests/soak/seeds-transfers.txt, which the suite plays.
"""

import ctypes
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeXferMetadata,
)

from tests.engine.test_mooncake import CASES, asking, connected, give_up_soon, transfers
from tests.helpers.engine import make_model, scheduler_of
from tests.helpers.huggingface import reference
from tests.helpers.mooncake import ENGINES, TransferEngine, stand_in
from tests.helpers.prompts import prompts_of
from tests.helpers.traffic import Traffic
from tests.helpers.v2 import engine_of
from tests.resume.seeds import failure, keep_in_file, print_counts, run

SEEDS = Path(__file__).with_name("seeds-transfers.txt")
MODELS = "K and V", "latent", "windows", "hybrid"
MAX_TOKENS, GIVEN_UP_AFTER, LOOK = 8, 1.0, 0.05
DEATHS = "before it asked", "before it is sent", "while it is sent", "after it was sent"
FAULTS = "none", "none", "none", "none", "torn", "late", "stalled", "dies"


class Wire:
    """What becomes of each transfer; of a producer that has died nothing arrives any more."""

    def __init__(self, seed: int, count: Counter[str]) -> None:
        self.draw, self.count = Traffic((seed, 61)), count
        self.lock, self.write = threading.Lock(), TransferEngine.batch_transfer_sync_write
        self.deaths, self.dead_until = 0, 0.0

    def transfer(self, engine: TransferEngine, session: str, *lists: list[int]) -> int:
        with self.lock:
            fault, lives = self.draw.pick(*FAULTS), self.deaths
            seconds = self.draw.rng.uniform(0.05, 0.3)
            self.count[f"transfers, {fault}"] += 1
        halves = [tuple(each[begin::2] for each in lists) for begin in (0, 1)]
        if not self._write(lives, engine, session, halves[0]):
            return -1
        asks = ENGINES[session]
        if isinstance(asks, MortalEngine) and asks.dies_while_it_is_sent:
            asks.die()
        if fault == "torn":
            return -1
        if fault == "dies":
            with self.lock:
                self.deaths, self.dead_until = self.deaths + 1, time.monotonic() + 0.5
        stalled = 2 * GIVEN_UP_AFTER + 10 * seconds
        # What the dead one says, nobody hears: it comes after all have seen that it is gone
        time.sleep({"late": seconds, "stalled": stalled, "dies": 1}.get(fault, 0))
        return 0 if self._write(lives, engine, session, halves[1]) else -1

    def _write(self, lives: int, engine: Any, session: str, lists: tuple[list[int], ...]) -> bool:
        with self.lock:
            lives_on = self.deaths == lives and session in ENGINES
            return lives_on and self.write(engine, session, *lists) == 0

    async def is_gone(self, address: str) -> bool:
        return time.monotonic() < self.dead_until


class MortalEngine(TransferEngine):
    """The transfer engine of a decoder that dies."""

    def __init__(self, host: str, num_bytes: int) -> None:
        self.initialize(host, "P2PHANDSHAKE", "tcp", "")
        self.session, self.bytes = f"{host}:{self.port}", ctypes.create_string_buffer(num_bytes)
        self.batch_register_memory([ctypes.addressof(self.bytes)], [num_bytes])
        self.dies_while_it_is_sent = False

    def die(self) -> None:
        ENGINES.pop(self.session, None)


def ask_and_die(worker: Any, transfer_id: str, blocks: list[list[int]], when: str) -> None:
    """Ask a producer for a prompt, as a decoder of the same model does, and hear no answer.

    All planes of this decoder are in the same place: nobody reads them.
    """
    nbytes = worker.block_len_per_layer
    engine = MortalEngine(worker.hostname, max(nbytes) * (1 + max(map(max, blocks))))
    asked = MooncakeXferMetadata(
        remote_hostname=worker.hostname,
        remote_port=engine.port,
        remote_tp_size=worker.tp_size,
        remote_tp_rank=worker.tp_rank,
        req_blocks={f"of {transfer_id}": (transfer_id, blocks)},
        kv_caches_base_addr=[ctypes.addressof(engine.bytes)] * len(nbytes),
        block_lens=nbytes,
        kv_block_lens=nbytes,
        registered_layer_names=worker.registered_layer_names,
        registered_layer_indices=worker.registered_layer_indices,
        registered_group_indices=worker.registered_group_indices,
        registered_shared_group_ids=[list(groups) for groups in worker.region_shared_groups],
        registered_row_offsets=worker.region_row_offsets,
    )
    engine.dies_while_it_is_sent = when == "while it is sent"
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(f"tcp://{worker.hostname}:{worker.side_channel_port}")
        socket.send(msgspec.msgpack.encode(asked))
    if when == "before it is sent":
        engine.die()


class Serving(Traffic):
    """Waves of requests to one engine."""

    def __init__(self, seed: int, llm: Any, prompts: list[list[int]], expected: list[list[int]]):
        super().__init__((seed, 62))
        self.core, self.scheduler = llm.llm_engine, scheduler_of(llm)
        self.worker: Any = get_kv_transfer_group().connector_worker  # type: ignore[attr-defined]
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free = self.pool.get_num_free_blocks()
        self.prompts, self.expected = prompts, expected
        self.fails = self.scheduler.vllm_config.kv_transfer_config.kv_load_failure_policy == "fail"
        self.alive: dict[str, int] = {}  # requests that decode -> their prompts
        self.sent: dict[str, tuple[int, Any]] = {}  # those that compute -> prompt, who asks
        self.names = 0

    def wave(self) -> None:
        """Serve some requests, from their beginning until all blocks are back."""
        left = self.number(3, 8)
        while left or self.alive or self.sent:
            if left and self.chance(0.5):
                left -= 1
                self._arrive()
            if self.chance(0.02) and self.alive:
                self._abort(self.alive)
            if self.chance(0.02) and self.sent:
                self._abort(self.sent)
            self._step()
        deadline = time.monotonic() + 60
        while self.pool.get_num_free_blocks() != self.free or self.scheduler.has_requests():
            assert time.monotonic() < deadline, (
                f"{self.free - self.pool.get_num_free_blocks()} blocks are kept, of "
                f"{list(self.scheduler.requests)}"
            )
            self._step()
        for engine in [*ENGINES.values()]:
            if isinstance(engine, MortalEngine):
                engine.die()
        self.count["waves"] += 1

    def _arrive(self) -> None:
        """Compute a prompt elsewhere first, as a rule; some ask for what nobody computes."""
        number = self.number(0, len(self.prompts) - 1)
        ((sent, asked),) = transfers(self.prompts[:1])
        (params,) = asking([asked], MAX_TOKENS)
        if self.chance(0.1):
            self.count["prompts that nobody computes"] += 1
            self._decode(number, params)
        elif self.chance(0.2):
            self.count["prompts that are not divided"] += 1
            (params,) = asking([{}], MAX_TOKENS)
            self._decode(number, params)
        else:
            (own,) = asking([sent], 1)
            self.sent[self._add(number, own)] = number, params
            if self.chance(0.2):  # the other one asks at once
                self._decode(number, params)
                self.sent[next(reversed(self.sent))] = number, None

    def _add(self, number: int, params: Any) -> str:
        name, self.names = f"r{self.names}", self.names + 1
        self.core.add_request(name, {"prompt_token_ids": [*self.prompts[number]]}, params)
        return name

    def _decode(self, number: int, params: Any) -> None:
        self.alive[self._add(number, params)] = number

    def _asked_first(self, number: int, params: Any) -> Any:
        """Let a decoder die of the prompt now and then: the next one computes it itself."""
        if not self.chance(0.2):
            return params
        when = self.pick(*DEATHS)
        self.count[f"decoders that died {when}"] += 1
        if when != "before it asked":
            size, groups = self.scheduler.block_size, self.scheduler.kv_cache_config.kv_cache_groups
            blocks = [[*range(1, 1 - (-len(self.prompts[number]) // size))] for _ in groups]
            transfer_id = params.extra_args["kv_transfer_params"]["transfer_id"]
            ask_and_die(self.worker, transfer_id, blocks, when)
        (alone,) = asking([{}], MAX_TOKENS)
        return alone

    def _abort(self, requests: dict[str, Any]) -> None:
        name = self.pick(*requests)
        self.core.abort_request([name])
        what = requests.pop(name)
        self.count["aborted"] += 1
        if isinstance(what, tuple) and what[1] is not None:  # it is asked for all the same
            self._decode(*what)

    def _step(self) -> None:
        outputs = self.core.step()
        self.count["steps"] += bool(outputs)
        for output in outputs:
            name, (found,) = output.request_id, output.outputs
            if not output.finished:
                continue
            if name in self.sent:
                number, params = self.sent.pop(name)
                if params is not None:
                    self._decode(number, self._asked_first(number, params))
            elif name in self.alive:
                number, tokens = self.alive.pop(name), list(found.token_ids)
                self.count[f"answers, {found.finish_reason}"] += 1
                if found.finish_reason == "error":
                    assert self.fails and not tokens
                else:
                    assert tokens == self.expected[number], (number, tokens)


def play(seed: int, steps: int) -> tuple[dict[str, Any], Counter[str]]:
    """Serve until so many steps are done: what was drawn, and what happened how often."""
    draw = Traffic((seed, 60))
    name, runner = draw.pick(*MODELS), draw.pick("V2", "V2", "V1")
    config, lengths, more = CASES[name]
    told = {
        "model": name,
        "runner": runner,
        "policy": draw.pick("recompute", "fail"),
        "prefix cache": bool(name != "hybrid" and draw.chance(0.5)),
        "asynchronous": bool(draw.chance(0.5)),
    }
    # The stand-in and the addresses are there for as long as the engine is
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        stand_in(monkeypatch)
        give_up_soon(monkeypatch)
        settings = connected(monkeypatch, told["policy"], **more)
        settings["enable_prefix_caching"] = told["prefix cache"]
        settings["async_scheduling"] = told["asynchronous"]
        if name == "K and V" and draw.chance(0.5):
            told["blocks"] = settings["num_gpu_blocks_override"] = draw.number(60, 90)
            settings["max_model_len"] = 104
        model, prompts = make_model(Path(folder) / "model", **config), prompts_of(seed, lengths)
        expected = reference(model, prompts, MAX_TOKENS)
        with engine_of(runner, model, **settings) as llm:
            serving = Serving(seed, llm, prompts, expected)
            wire = Wire(seed, serving.count)
            of_module = "vllm_npu_prep.attention.mooncake."
            monkeypatch.setattr(
                TransferEngine, "batch_transfer_sync_write", lambda *g: wire.transfer(*g)
            )
            monkeypatch.setattr(of_module + "_is_gone", wire.is_gone)
            monkeypatch.setattr(of_module + "SECONDS_BETWEEN_LOOKS", LOOK)
            monkeypatch.setattr(of_module + "SECONDS_AFTER_TIMEOUT", 0)
            while serving.count["steps"] < steps:
                serving.wave()
            count = serving.count
            del serving
    return told, count


class Episodes:
    """Plays seeds, and counts what happened."""

    def __init__(self) -> None:
        self.count = Counter[str]()

    def play(self, seed: int, steps: int) -> tuple[str, dict[str, Any]]:
        try:
            told, count = play(seed, steps)
        except Exception as error:
            keep_in_file(seed, SEEDS)
            return "failed", failure(seed, error, SEEDS)
        self.count += count
        return "agreed", {**told, **count}

    def report(self) -> None:
        print_counts(self.count)


if __name__ == "__main__":
    prog, results = "python -m tests.soak.transfers", "soak-transfers.jsonl"
    sys.exit(run(Episodes(), prog, __doc__, results, 1, steps=200))
