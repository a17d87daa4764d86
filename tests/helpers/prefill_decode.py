"""Two engines in processes of their own: one computes prompts, the other one decodes them.

K and V move by Mooncake's own transfer engine, over TCP.
"""

import ctypes
import itertools
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.waiting import LIMIT
from tests.server.process import free_port

ROOT = Path(__file__).parents[2]
PRODUCER, CONSUMER = ROLES = "kv_producer", "kv_consumer"
LIBRARIES = "libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1", "librdmacm.so.1"
"""What Mooncake links to, each after those that it needs itself."""
HOST, DEVICE_TO_HOST, HOST_TO_DEVICE = "127.0.0.1", 2, 1
NUMBERS = itertools.count()


def variables_of_mooncake() -> dict[str, str]:
    """Variables with which a process finds Mooncake; skips the test where it can't be had."""
    script = ROOT / "scripts" / "mooncake.sh"
    done = subprocess.run(
        [str(script)],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    if done.returncode:
        pytest.skip(f"{script} could not fetch Mooncake: {done.stderr.strip().splitlines()[-1]}")
    return dict(line.split("=", 1) for line in done.stdout.split())


class Side:
    """The producer or the consumer: a process, whose engines come one after the other."""

    def __init__(self, context: Any, role: str, environment: dict[str, str]) -> None:
        self.role, self.engine_id = role, f"{role}-{next(NUMBERS)}"
        self._connection, theirs = multiprocessing.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, environment))
        self.process.start()
        theirs.close()

    def begin(self, runner: str, model: Path, port: int, **settings: Any) -> None:
        """Start an engine; `answer` is there once it has started."""
        transfer = {"kv_connector": "MooncakeConnector", "kv_role": self.role}
        transfer |= {"engine_id": self.engine_id}
        transfer["kv_connector_extra_config"] = {"mooncake_protocol": "tcp"}
        self._connection.send((runner, model, port, {"kv_transfer_config": transfer, **settings}))

    def ask(self, what: str, *given: Any) -> Any:
        """Ask, and wait for the answer."""
        self._connection.send((what, given))
        return self.answer()

    def answer(self) -> Any:
        assert self._connection.poll(LIMIT), f"no answer of {self.role} in {LIMIT} s"
        answer = self._connection.recv()
        assert not isinstance(answer, str), answer
        return answer

    def end(self) -> None:
        self.process.terminate()
        self.process.join(LIMIT)
        self.process.kill()


class Pair:
    """A producer and a consumer."""

    def __init__(self, context: Any, of_side: tuple[dict[str, str], dict[str, str]]) -> None:
        shared = variables_of_mooncake() | {"VLLM_HOST_IP": HOST}
        self.producer, self.consumer = (
            Side(context, role, shared | own) for role, own in zip(ROLES, of_side)
        )
        self.sides = self.producer, self.consumer

    @contextmanager
    def engines(
        self, runner: str, model: Path, *own: dict[str, Any], **settings: Any
    ) -> Iterator[list[int]]:
        """Two engines of one model, and the blocks that each has; `own` are settings of a side."""
        port = free_port()  # of each engine its own: an engine of a process keeps it to the end
        self.address = f"http://{HOST}:{port}"
        for side, more in zip(self.sides, own or ({}, {}), strict=True):
            side.begin(runner, model, port, **{**settings, **more})
        for side in self.sides:
            side.answer()
        yield [side.ask("free") for side in self.sides]
        for side in self.sides:
            side.ask("end")

    def decode(
        self, prompts: list[list[int]], max_tokens: int
    ) -> tuple[list[list[int]], list[int]]:
        """Let one side compute prompts, and the other one decode: its tokens, and those fetched."""
        transfers = [{"transfer_id": f"transfer-{next(NUMBERS)}"} for _ in prompts]
        sent = [each | {"do_remote_decode": True, "do_remote_prefill": False} for each in transfers]
        ask = {"remote_engine_id": self.producer.engine_id, "remote_bootstrap_addr": self.address}
        ask |= {"do_remote_decode": False, "do_remote_prefill": True}
        self.producer.ask("generate", prompts, 1, sent)
        return self.consumer.ask(
            "generate", prompts, max_tokens, [each | ask for each in transfers]
        )

    def end(self) -> None:
        for side in self.sides:
            side.end()


def _serve(connection: Connection, environment: dict[str, str]) -> None:
    """Start engines and answer, until the other end is closed."""
    try:
        os.environ.update(environment)
        sys.path.insert(0, environment["PYTHONPATH"])
        for name in LIBRARIES:
            if (library := Path(environment["LD_LIBRARY_PATH"], name)).exists():
                ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        from tests.helpers.v2 import engine_of

        if os.environ["NPU_PREP_DEVICE"] == "npu":
            move_emulated_memory()
        while True:
            runner, model, port, settings = connection.recv()
            os.environ["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(port)
            with engine_of(runner, model, **settings) as llm:
                connection.send(None)
                _answer(connection, llm)
            connection.send(None)
    except EOFError:
        pass
    except BaseException:
        connection.send(traceback.format_exc())
        raise


def _answer(connection: Connection, llm: Any) -> None:
    from tests.helpers.engine import free_blocks, scheduler_of

    scheduler = scheduler_of(llm)
    while True:
        if not connection.poll(0.005):
            if scheduler.has_requests():  # a prompt is sent, or its blocks come back
                llm.llm_engine.step()
            continue
        what, given = connection.recv()
        if what == "end":
            return
        connection.send(generate(llm, *given) if what == "generate" else free_blocks(llm))


def generate(
    llm: Any, prompts: list[list[int]], max_tokens: int, transfers: list[dict[str, Any]]
) -> tuple[list[list[int]], list[int]]:
    """Greedy tokens, and how many tokens of each prompt did not have to be computed."""
    from tests.helpers.engine import greedy

    params = [greedy(max_tokens, extra_args={"kv_transfer_params": each}) for each in transfers]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    done = llm.generate(given, params, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in done], [
        each.num_cached_tokens for each in done
    ]


# ----------------------------------------------------------------- emulated cards


def move_emulated_memory() -> None:
    """Let Mooncake move bytes of emulated cards, whose addresses no host may touch.

    It gets the addresses by which emulated kernels reach the same bytes. What it reads of a card is
    also copied to the host, and what it has written is copied onto the card once more, by the
    runtime: these copies are hazards unless the streams that write or read there have been waited
    for.
    """
    from ascend_emulator.api import _runtime
    from vllm_npu_prep.attention import mooncake

    runtime = _runtime()
    runtime.emulator_alias.restype = ctypes.c_void_p
    runtime.emulator_alias.argtypes = [ctypes.c_void_p]
    runtime.aclrtMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_size_t] * 2 + [ctypes.c_int]
    worker = mooncake.PlaneWorker
    register, answered = worker.register_kv_caches, worker.process_pulling_result

    class Engine:
        """Mooncake's engine, which gets other addresses."""

        def __init__(self, engine: Any) -> None:
            self.engine = engine
            self.memory: list[tuple[int, int, int]] = []  # alias, address and bytes

        def __getattr__(self, name: str) -> Any:
            return getattr(self.engine, name)

        def batch_register_memory(self, starts: list[int], sizes: list[int]) -> int:
            aliases = [runtime.emulator_alias(start) for start in starts]
            self.memory += zip(aliases, starts, sizes)
            return self.engine.batch_register_memory(aliases, sizes)

        def batch_transfer_sync_write(
            self, session: str, sources: list[int], targets: list[int], sizes: list[int]
        ) -> int:
            for source, size in zip(sources, sizes):
                read = ctypes.create_string_buffer(size)
                copy = ctypes.addressof(read), size, self.device(source), size
                assert runtime.aclrtMemcpy(*copy, DEVICE_TO_HOST) == 0
            return self.engine.batch_transfer_sync_write(session, sources, targets, sizes)

        def device(self, alias: int) -> int:
            for first, address, nbytes in self.memory:
                if first <= alias < first + nbytes:
                    return address + alias - first
            raise AssertionError(f"{alias:#x} is not registered")

    def register_aliases(self: Any, kv_caches: dict[str, Any]) -> None:
        self.engine, listen = Engine(self.engine), self._listen
        self._listen = lambda: None  # until the addresses are those that Mooncake has
        register(self, kv_caches)
        self.kv_caches_base_addr = [runtime.emulator_alias(at) for at in self.kv_caches_base_addr]
        self._listen = listen
        if not self.is_kv_consumer:
            listen()

    def note_received(self: Any, response: Any, pull_metas: Any) -> None:
        self._bind_sender_thread_device()
        for req_id in response.ok_reqs or ():
            groups = pull_metas[req_id].local_block_ids
            for base, nbytes, group in zip(
                self.kv_caches_base_addr, self.block_len_per_layer, self.registered_group_indices
            ):
                for block in groups[group] if groups else ():
                    alias = base + block * nbytes
                    received = ctypes.create_string_buffer(ctypes.string_at(alias, nbytes), nbytes)
                    copy = self.engine.device(alias), nbytes, ctypes.addressof(received), nbytes
                    assert runtime.aclrtMemcpy(*copy, HOST_TO_DEVICE) == 0
        answered(self, response, pull_metas)

    worker.register_kv_caches, worker.process_pulling_result = register_aliases, note_received  # type: ignore[method-assign]
