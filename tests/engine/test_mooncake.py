"""K and V over Mooncake: prompts that one engine computed and another one decodes.

Here an engine sends to itself, by a stand-in for the transfer engine: blocks of the requests that
were computed go to blocks of those that ask for them. `tests/server/test_prefill_decode.py` has two
engines and the real transfer engine.
"""

import itertools
from typing import Any

import pytest

from tests.conftest import SEED
from tests.engine.test_kv_transfer import count_tokens
from tests.helpers.engine import LLAMA4, generate, graphs, greedy, make_model
from tests.helpers.huggingface import is_varied, reference
from tests.helpers.hybrids import QWEN3_NEXT
from tests.helpers.latent import LATENT, V3_EXPERTS, V32
from tests.helpers.mooncake import mooncake  # noqa: F401
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import engine_of, on_both
from tests.helpers.waiting import wait_until
from tests.helpers.windows import THREE_GROUPS
from tests.server.process import free_port

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


def connected(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> dict[str, Any]:
    """Settings of an engine that sends to itself and has no prefix cache to find prompts in."""
    port = free_port()
    monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(port))
    transfer = {"kv_connector": "MooncakeConnector", "kv_role": "kv_both", "engine_id": ENGINE_ID}
    return {
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 48,
        "enable_prefix_caching": False,
        "additional_config": {"npu_prep": {"check": "full"}},
        "kv_transfer_config": transfer,
        **settings,
    }


NUMBERS = itertools.count()


def transfers(llm: Any, prompts: list[list[int]]) -> list[tuple[Any, Any]]:
    """For each prompt what the request that computes it is told, and what the one that decodes."""
    import os

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


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def free_blocks(llm: Any) -> int:
    """Blocks that nobody holds once all requests have ended and sent what they had to send."""
    core = llm.llm_engine.engine_core.engine_core
    wait_until(lambda: not core.scheduler.has_requests() or core.step() is None)
    return core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


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
        sent, asked = zip(*transfers(llm, prompts))
        # Of some the producer takes the last token away, in the list that it is given.
        generate(llm, [[*prompt] for prompt in prompts], asking(sent, 1))
        before = computed["scheduled"]
        assert before >= sum(lengths) - len(lengths)
        assert generate(llm, prompts, asking(asked, MAX_TOKENS)) == expected
        assert computed["scheduled"] - before == len(prompts) * MAX_TOKENS
        assert free_blocks(llm) == free
