"""K and V over Mooncake: prompts that one engine computed and another one decodes.

Here an engine sends to itself, by a stand-in for the transfer engine: blocks of the requests that
were computed go to blocks of those that ask for them. `tests/server/test_prefill_decode.py` has two
engines and the real transfer engine.
"""

import itertools
import os
import socket
import threading
from typing import Any

import pytest
import zmq.asyncio
from vllm import envs

from tests.conftest import SEED
from tests.engine.test_kv_transfer import count_tokens
from tests.helpers.engine import (
    LLAMA4,
    free_blocks,
    generate,
    graphs,
    greedy,
    make_model,
    scheduler_of,
)
from tests.helpers.huggingface import is_varied, reference
from tests.helpers.hybrids import QWEN3_NEXT
from tests.helpers.latent import LATENT, V3_EXPERTS, V32
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import engine_of, on_both
from tests.helpers.waiting import LIMIT, wait_until
from tests.helpers.windows import THREE_GROUPS
from tests.server.process import free_port
from vllm_npu_prep.errors import PrepError

BLOCK_SIZE = 4
ENGINE_ID = "this"
LENGTHS = [90, 33, 3, 71, 64, 1]
AROUND_A_BLOCK = [*range(40, 49), 90, 1]
"""Windows of tokens behind these prompts begin everywhere in a block."""
MAX_TOKENS = 8
CASES: dict[str, tuple[dict[str, Any], list[int], dict[str, Any]]] = {
    "K and V": ({}, LENGTHS, {}),
    "graphs": ({}, LENGTHS, graphs("FULL_AND_PIECEWISE", 1, 8, async_scheduling=True)),
    "latent": ({"family": "DeepseekV3", "q_lora_rank": 20, **LATENT, **V3_EXPERTS}, LENGTHS, {}),
    "sparse": ({"family": "DeepseekV32", **V32}, LENGTHS, {}),
    "windows": ({"family": "Gemma3", **THREE_GROUPS}, AROUND_A_BLOCK, {}),
    "chunks": (LLAMA4, [32, 33, 65, 90, 1], {"block_size": 16}),
    "hybrid": ({"family": "Qwen3Next", **QWEN3_NEXT}, LENGTHS, {}),
}


def connected(
    monkeypatch: pytest.MonkeyPatch, policy: str = "fail", **settings: Any
) -> dict[str, Any]:
    """Settings of an engine that sends to itself and has no prefix cache to find prompts in."""
    port = free_port()
    monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(port))
    transfer = {"kv_connector": "MooncakeConnector", "kv_role": "kv_both", "engine_id": ENGINE_ID}
    transfer["kv_load_failure_policy"] = policy
    return {
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 48,
        "enable_prefix_caching": False,
        "additional_config": {"npu_prep": {"check": "full"}},
        "kv_transfer_config": transfer,
        **settings,
    }


def give_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a request wait for a second, where a test waits for its end, and not for 480."""
    monkeypatch.setenv("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "1")


NUMBERS = itertools.count()


def transfers(prompts: list[list[int]]) -> list[tuple[Any, Any]]:
    """For each prompt what the request that computes it is told, and what the one that decodes."""
    address = f"http://127.0.0.1:{os.environ['VLLM_MOONCAKE_BOOTSTRAP_PORT']}"
    told = []
    for _ in prompts:
        transfer = {"transfer_id": f"transfer-{next(NUMBERS)}"}
        ask = {"remote_engine_id": ENGINE_ID, "remote_bootstrap_addr": address}
        told.append(
            (
                transfer | {"do_remote_decode": True, "do_remote_prefill": False},
                transfer | {"do_remote_decode": False, "do_remote_prefill": True, **ask},
            )
        )
    return told


def asking(params: list[dict[str, Any]], max_tokens: int) -> list[Any]:
    return [greedy(max_tokens, extra_args={"kv_transfer_params": each}) for each in params]


@pytest.mark.parametrize(("config", "lengths", "settings", "runner"), on_both(CASES))
def test_prompts_are_decoded_from_what_was_computed_elsewhere(
    tmp_path, monkeypatch, mooncake, config, lengths, settings, runner
):
    """Only the last token of a prompt is computed again; tokens are those of transformers."""
    model, prompts = make_model(tmp_path / "model", **config), prompts_of(SEED, lengths)
    expected = reference(model, prompts, MAX_TOKENS)
    assert is_varied(expected)
    with engine_of(runner, model, **connected(monkeypatch, **settings)) as llm:
        computed, free = count_tokens(llm), free_blocks(llm)
        sent, asked = zip(*transfers(prompts))
        # Of some the producer takes the last token away, in the list that it is given.
        generate(llm, [[*prompt] for prompt in prompts], asking(sent, 1))
        before = computed["scheduled"]
        assert before >= sum(lengths) - len(lengths)
        assert generate(llm, prompts, asking(asked, MAX_TOKENS)) == expected
        assert computed["scheduled"] - before == len(prompts) * MAX_TOKENS
        assert free_blocks(llm) == free


@pytest.fixture(scope="module")
def expected(qwen3):
    return reference(qwen3, prompts_of(SEED, LENGTHS), MAX_TOKENS)


def test_what_a_worker_lacks_is_one_line(qwen3, monkeypatch, mooncake):
    """A port that another server has, and a protocol that the host has not."""
    with socket.create_server(("0.0.0.0", 0)) as taken:
        settings, port = connected(monkeypatch), taken.getsockname()[1]
        monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(port))
        with pytest.raises(PrepError, match=f"have port {port} .Address already in use"):
            engine_of("V2", qwen3, **settings).__enter__()
    monkeypatch.setattr(mooncake, "initialize", lambda *_: -1)
    with pytest.raises(PrepError, match="does not start on 127"):
        engine_of("V2", qwen3, **connected(monkeypatch)).__enter__()


def half_of(engine: Any) -> Any:
    """Let a transfer write half of its blocks and fail."""
    whole = engine.batch_transfer_sync_write

    def torn(self: Any, session: str, *lists: list[int]) -> int:
        whole(self, session, *(each[::2] for each in lists))
        return -1

    return torn


def outputs(llm: Any, prompts: list[list[int]], params: list[Any]) -> list[tuple[str, list[int]]]:
    """How each request ended, and its tokens."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = [each.outputs[0] for each in llm.generate(inputs, params, use_tqdm=False)]
    return [(each.finish_reason, list(each.token_ids)) for each in found]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_torn_transfers_give_errors_or_the_same_tokens(
    qwen3, expected, monkeypatch, mooncake, policy
):
    """What arrived in part is computed again, or its clients get an error. All blocks come back."""
    prompts = prompts_of(SEED, LENGTHS)
    give_up_soon(monkeypatch)
    monkeypatch.setattr(mooncake, "batch_transfer_sync_write", half_of(mooncake))
    with engine_of("V2", qwen3, **connected(monkeypatch, policy)) as llm:
        free = free_blocks(llm)
        sent, asked = zip(*transfers(prompts))
        generate(llm, prompts, asking(sent, 1))
        ended = outputs(llm, prompts, asking(asked, MAX_TOKENS))
        if policy == "recompute":
            assert ended == [("length", tokens) for tokens in expected]
        else:
            assert ended == [("error", [])] * len(prompts)
        assert generate(llm, prompts, greedy(MAX_TOKENS)) == expected
        assert free_blocks(llm) == free


def test_blocks_of_an_abort_stay_until_the_transfer_ended(qwen3, expected, monkeypatch, mooncake):
    """A late transfer writes to blocks that nobody else has; other requests go on meanwhile."""
    prompts = prompts_of(SEED, LENGTHS)
    began, goes_on = threading.Event(), threading.Event()

    def late() -> int:
        began.set()
        assert goes_on.wait(LIMIT)
        return 0

    with engine_of("V2", qwen3, **connected(monkeypatch)) as llm:
        free, pool = free_blocks(llm), scheduler_of(llm).kv_cache_manager.block_pool
        ((sent, asked),) = transfers(prompts[:1])
        generate(llm, prompts[:1], asking([sent], 1))
        monkeypatch.setattr(mooncake, "on_write", staticmethod(late))
        (params,) = asking([asked], MAX_TOKENS)
        engine = llm.llm_engine
        engine.add_request("1000", {"prompt_token_ids": prompts[0]}, params)
        wait_until(lambda: engine.step() == [] and began.is_set())
        engine.abort_request(["1000"])
        assert generate(llm, prompts[1:], greedy(MAX_TOKENS)) == expected[1:]
        sides = 2  # of the request that was computed, and of the one that waits
        assert free - pool.get_num_free_blocks() == sides * -(-len(prompts[0]) // BLOCK_SIZE)
        goes_on.set()
        assert free_blocks(llm) == free


class Stalled:
    """A transfer that goes on when it is told to."""

    def __init__(self, engine: Any) -> None:
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.written, self.write = threading.Event(), engine.batch_transfer_sync_write
        engine.batch_transfer_sync_write = lambda *given: self._stall(given)

    def _stall(self, given: tuple[Any, ...]) -> int:
        self.began.set()
        assert self.goes_on.wait(LIMIT)
        result = self.write(*given)
        self.written.set()
        return result

    def go_on(self) -> None:
        assert self.began.is_set() and not self.written.is_set()
        self.goes_on.set()
        assert self.written.wait(LIMIT)


def hurried(self: Any, option: int, value: Any, plain: Any = zmq.asyncio.Socket.setsockopt) -> None:
    """Set an option, and half a second in place of any time to wait for a message."""
    plain(self, option, 500 if option == zmq.RCVTIMEO else value)


@pytest.mark.parametrize(
    ("policy", "late"),
    [("recompute", "to its request"), ("recompute", "to others"), ("fail", "to others")],
)
def test_blocks_of_a_stalled_transfer_are_nobody_elses(
    qwen3, expected, monkeypatch, mooncake, policy, late
):
    """The producer goes on after its request was given up: while that one decodes, or others do.

    The decoder had a part of the prompt in its prefix cache; the producer had it under a salt.
    """
    prompts = prompts_of(SEED, LENGTHS)
    # The decoder gives up after a second; what was computed waits for as long as vLLM lets it
    later = 1 - envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
    monkeypatch.setattr("vllm_npu_prep.attention.mooncake.SECONDS_AFTER_TIMEOUT", later)
    small = connected(monkeypatch, policy, num_gpu_blocks_override=120, enable_prefix_caching=True)
    done: dict[str, list[int]] = {}
    with engine_of("V2", qwen3, **small) as llm:
        engine, pool = llm.llm_engine, scheduler_of(llm).kv_cache_manager.block_pool
        free = free_blocks(llm)

        def step() -> bool:
            """Step, and tell whether all requests have ended."""
            for each in engine.step():
                done[each.request_id] = list(each.outputs[0].token_ids)
            return not engine.has_unfinished_requests()

        ((sent, asked),) = transfers(prompts[:1])
        salted: Any = {"prompt_token_ids": prompts[0], "cache_salt": "sent"}
        llm.generate([salted], asking([sent], 1), use_tqdm=False)
        cached, blocks = 40, -(-len(prompts[0]) // BLOCK_SIZE)
        held = 2 * blocks - cached // BLOCK_SIZE  # those that are sent, and those that are kept
        generate(llm, [prompts[0][:cached]], greedy(1))
        with monkeypatch.context() as during:
            during.setattr(
                mooncake, "batch_transfer_sync_write", mooncake.batch_transfer_sync_write
            )
            # A limit of time that upstream sets would end before the request is given up
            during.setattr(zmq.asyncio.Socket, "setsockopt", hurried)
            transfer = Stalled(mooncake)
            (params,) = asking([asked], MAX_TOKENS)
            engine.add_request("asked", {"prompt_token_ids": prompts[0]}, params)
            if late == "to its request":
                wait_until(lambda: step() or len(done.get("asked", ())) >= 3)
                assert free - pool.get_num_free_blocks() >= held + blocks  # new ones
            else:
                wait_until(step)
                assert free - pool.get_num_free_blocks() == held
                for number, prompt in enumerate(prompts):
                    given: Any = {"prompt_token_ids": prompt, "cache_salt": "others"}
                    engine.add_request(str(number), given, greedy(MAX_TOKENS))
                for _ in range(3):
                    step()
            transfer.go_on()
            wait_until(step)
        assert done.pop("asked") == (expected[0] if policy == "recompute" else [])
        assert done == {str(number): expected[number] for number in range(len(done))}
        assert generate(llm, prompts, greedy(MAX_TOKENS)) == expected
        assert free_blocks(llm) == free


def test_prompts_that_nobody_computes_end_with_an_error(qwen3, expected, monkeypatch, mooncake):
    """Nor do they keep blocks, in a cache that has room for one of them alone."""
    prompts = prompts_of(SEED, LENGTHS)[:2]
    give_up_soon(monkeypatch)
    small = connected(monkeypatch, num_gpu_blocks_override=27, max_model_len=104)
    with engine_of("V2", qwen3, **small) as llm:
        free = free_blocks(llm)
        _, asked = zip(*transfers(prompts))
        assert outputs(llm, prompts, asking(asked, 8)) == [("error", [])] * len(prompts)
        assert free_blocks(llm) == free
        assert generate(llm, prompts, greedy(MAX_TOKENS)) == expected[:2]
