"""Blocks that leave the device's cache come back from the host (``--kv-offloading-size``)."""

from unittest import mock

import numpy as np
import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from tests.engine.test_kv_transfer import count_tokens
from tests.helpers.engine import engine, generate, graphs, greedy, make_model
from tests.helpers.huggingface import is_varied, reference
from tests.helpers.hybrids import GATED_DELTA
from tests.helpers.latent import GLM_DSA, LATENT, V3_EXPERTS
from tests.helpers.life_cycle import generate_with_calls
from tests.helpers.prompts import prompts_of
from tests.helpers.sessions import send_part
from tests.helpers.v2 import RUNNERS, engine_of, on_both
from tests.helpers.watch import count_batched
from tests.helpers.windows import THREE_GROUPS
from vllm_npu_prep.attention.offloading import PlaneOffloadingWorker
from vllm_npu_prep.errors import PrepError

BLOCK_SIZE = 4
LENGTHS = [61, 90, 33]
OTHERS = [150, 140]
IN_CHUNKS = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"} | {
    "kv_connector_extra_config": {"blocks_per_chunk": 2}
}
CASES = {
    "in chunks": ("Qwen3", {}, {"async_scheduling": False}),
    "graphs": (
        "Qwen3",
        {},
        graphs("FULL_AND_PIECEWISE", 1, 8, async_scheduling=True, kv_transfer_config=IN_CHUNKS),
    ),
    "latent": ("DeepseekV3", {**LATENT, **V3_EXPERTS}, {}),
    "sparse": ("GlmMoeDsa", GLM_DSA, graphs("FULL_DECODE_ONLY", 1, 8)),
    "states": (
        "Qwen3_5",
        GATED_DELTA,
        graphs("FULL_DECODE_ONLY", 1, 8, 16, async_scheduling=True)
        | {"block_size": 16, "enable_prefix_caching": True, "num_gpu_blocks_override": 40},
    ),
    # Of a window of a multiple of blocks and one token vLLM looks for a block more than it stores
    "windows": ("Gemma3", THREE_GROUPS | {"sliding_window": 16}, {"num_gpu_blocks_override": 150}),
}


def offloading(**settings) -> dict:
    """Settings of an engine whose device holds two prompts or so, and whose host holds all."""
    return {
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 64,
        "max_model_len": 192,
        "kv_offloading_size": 0.01,
        "additional_config": {"npu_prep": {"check": "full"}},
        **settings,
    }


def left_to_compute(length: int, chunk: int) -> int:
    """Tokens of a prompt that are computed when the host has all whole chunks of it."""
    return length - (length - 1) // chunk * chunk


def computed_again(llm, prompts, others, expected) -> int:
    """Tokens that prompts take whose blocks others had in between; all one at a time."""
    computed, length = count_tokens(llm), len(expected[0])
    for prompt, tokens in zip(prompts, expected):
        assert generate(llm, [prompt], greedy(length)) == [tokens]
    for other in others:
        generate(llm, [other], greedy(2))
    before, load = computed["scheduled"], PlaneOffloadingWorker.submit_load
    loads = {"autospec": True, "side_effect": load}
    with mock.patch.object(PlaneOffloadingWorker, "submit_load", **loads) as submitted:
        for prompt, tokens in zip(prompts, expected):
            assert generate(llm, [prompt], greedy(length)) == [tokens]
    assert submitted.call_count == len(prompts), "none had all of its blocks on the device"
    return computed["scheduled"] - before


@pytest.mark.parametrize(("name", "runner"), on_both({name: name for name in CASES}))
def test_prompts_that_were_evicted_come_back_from_the_host(name, tmp_path, seed, runner):
    """Tokens are those of transformers; only what the host lacks is computed again."""
    family, config, settings = CASES[name]
    model = make_model(tmp_path / "model", family, **config)
    prompts, others = prompts_of(seed, LENGTHS), prompts_of(seed + 1, OTHERS)
    expected = reference(model, prompts, 6)
    assert is_varied(expected)
    chunk = settings.get("block_size", BLOCK_SIZE) * (2 if "kv_transfer_config" in settings else 1)
    with engine_of(runner, model, **offloading(**settings)) as llm:
        again = computed_again(llm, prompts, others, expected)
        batched = count_batched(llm)
        # All at once: loads and stores beside other requests' steps, and blocks that change hands
        assert generate(llm, prompts + others, greedy(6))[: len(prompts)] == expected
        disturbed, calls = generate_with_calls(llm, prompts + others, greedy(6), seed)
    assert disturbed[: len(prompts)] == expected, dict(calls)
    assert batched["taken"] > len(prompts)
    assert calls["requests reset"] + calls["caches cleared in pauses"] > 0
    left = sum(left_to_compute(length, chunk) + 5 for length in LENGTHS)
    assert again == left


def test_new_weights_find_nothing_of_the_old_ones_on_the_host(tmp_path, seed):
    """A sleep at level 2 has upstream's connector forget; then its blocks are stored anew.

    Nobody gets zeroes that stores find which had not begun when the engine fell asleep.
    """
    old, new = (make_model(tmp_path / str(each), seed=each) for each in (0, 1))
    prompts, others = prompts_of(seed, LENGTHS), prompts_of(seed + 1, OTHERS)
    before, after = (reference(each, prompts, 6) for each in (old, new))
    assert before != after
    with engine(old, enable_sleep_mode=True, **offloading(async_scheduling=True)) as llm:
        for _ in range(2):
            assert generate(llm, prompts, greedy(6)) == before
            llm.sleep()
            llm.wake_up()
            left = sum(left_to_compute(length, BLOCK_SIZE) + 5 for length in LENGTHS)
            assert computed_again(llm, prompts, others, before) == left
        computed = count_tokens(llm)
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(new)})
        llm.wake_up(tags=["kv_cache"])
        assert generate(llm, prompts, greedy(6)) == after
        assert computed["scheduled"] >= sum(LENGTHS), "nothing was known"
        computed_again(llm, prompts, others, after)


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_jobs_copy_what_plain_books_say(seed, blocks_per_chunk):
    """Groups with planes of their own and shared ones, chunks that begin before the first block."""
    rng = np.random.default_rng(seed)
    planes = [torch.from_numpy(rng.integers(-128, 127, (40, 6 + i), np.int8)) for i in range(3)]
    groups, num_chunks = ([0, 1], [1, 2]), 12
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(plane, plane.shape[1]) for plane in planes],
        [[CanonicalKVCacheRef(i, planes[i].shape[1]) for i in group] for group in groups],
    )
    worker = PlaneOffloadingWorker(caches, blocks_per_chunk, num_chunks)
    assert worker.nbytes == num_chunks * blocks_per_chunk * sum(p.shape[1] for p in planes)
    for job in range(60):
        counts = rng.integers(0, 6, 2)
        firsts = rng.integers(0, 9, 2)
        chunks = [
            -(-(first % blocks_per_chunk + n) // blocks_per_chunk) * (n > 0)
            for first, n in zip(firsts, counts)
        ]
        blocks, rows = rng.permutation(40)[: counts.sum()], rng.permutation(12)[: sum(chunks)]
        device = GPULoadStoreSpec(blocks.tolist(), counts.tolist(), firsts.tolist())
        before = [plane.clone() for plane in planes]
        if not counts.sum():
            continue
        assert worker.submit_store(2 * job, device, CPULoadStoreSpec(rows.tolist()))
        begin = 0
        for group, n in zip(groups, counts):  # what the blocks hold is gone
            for index in group:
                planes[index][blocks[begin : begin + n]] = 0
            begin += n
        assert worker.submit_load(2 * job + 1, CPULoadStoreSpec(rows.tolist()), device)
        assert [(r.job_id, r.success) for r in worker.get_finished()] == [
            (2 * job, True),
            (2 * job + 1, True),
        ]
        for plane, old in zip(planes, before):
            assert torch.equal(plane, old)
    # Of six blocks that were stored together, the last four come back, elsewhere
    chunks = list(range(-(-6 // blocks_per_chunk)))
    stored = GPULoadStoreSpec([*range(6)], [6, 0], [0, 0])
    wanted = GPULoadStoreSpec([30, 20, 21, 10], [4, 0], [2, 0])
    assert worker.submit_store(200, stored, CPULoadStoreSpec(chunks))
    assert worker.submit_load(201, CPULoadStoreSpec(chunks[2 // blocks_per_chunk :]), wanted)
    for index in groups[0]:
        assert torch.equal(planes[index][[30, 20, 21, 10]], planes[index][2:6])
    worker.wait({1, 2})
    worker.shutdown()


def test_memory_that_is_too_small_or_not_there_is_one_line(tmp_path):
    model = make_model(tmp_path / "model")
    with (
        pytest.raises(PrepError, match=r"107 bytes hold no block of \d[\d,]* bytes .*: give more"),
        engine(model, **offloading(kv_offloading_size=1e-7)),
    ):
        pass
    with (
        pytest.raises(PrepError, match=r"of host memory, of which [\d,]+ are free: give less"),
        engine(model, **offloading(kv_offloading_size=1e6)),
    ):
        pass


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_session_is_refused_and_other_requests_are_answered(runner, tmp_path, seed):
    """Upstream's connector would end the engine (`_remove_pending_job`)."""
    model = make_model(tmp_path / "model")
    prompts = prompts_of(seed, LENGTHS)
    with engine_of(runner, model, **offloading()) as llm:
        with pytest.raises(VLLMValidationError, match="or serve without --kv-offloading-size"):
            send_part(llm, "session", prompts[0], greedy(6))
        assert generate(llm, prompts, greedy(6)) == reference(model, prompts, 6)
