"""Prefill context parallelism: ranks share prompts, and tokens are those of whole ones."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.engine import graphs, make_model
from tests.helpers.huggingface import greedy_tokens, is_varied, load, logits_by
from tests.helpers.latent import GLM_DSA, LATENT, V3_EXPERTS
from tests.helpers.mixtures import MIXTURES
from tests.helpers.prompts import prompts_of
from tests.helpers.quantized import QUANTIZE, rounded_model
from tests.helpers.ranks import Ranks, preemptions, serve_on_ranks
from vllm_npu_prep.records.comparison import core_difference, oracle_difference
from vllm_npu_prep.records.record_file import read_record

NUM_TOKENS = 12
TWO = {"prefill_context_parallel_size": 2, "block_size": 16, "max_model_len": 128}
CACHED = {"enable_prefix_caching": True}
IN_GRAPHS = graphs("FULL_AND_PIECEWISE", 1, 2, 4, 16)
CASES: dict[str, dict[str, Any]] = {
    # Thirteen blocks don't hold all prompts and their answers
    "eager": {**TWO, **CACHED, "async_scheduling": False, "num_gpu_blocks_override": 14},
    "graphs": {**TWO, **CACHED, **IN_GRAPHS},
    "four ranks": {**TWO, "prefill_context_parallel_size": 4},
    "tensor parallelism": {**TWO, **IN_GRAPHS, "tensor_parallel_size": 2},
    "stages": {**TWO, **CACHED, **IN_GRAPHS, "pipeline_parallel_size": 2},
    "latent": {**TWO, **CACHED, **IN_GRAPHS},
    "sparse": {**TWO, **CACHED, **IN_GRAPHS},
    "int8, experts": {**TWO, **CACHED},
    "experts of one rank each": {
        **{**TWO, **IN_GRAPHS, "tensor_parallel_size": 2},
        "enable_expert_parallel": True,
    },
}
DEEPSEEK = {"family": "DeepseekV3", "q_lora_rank": 20, **LATENT, **V3_EXPERTS}
MODELS: dict[str, dict[str, Any]] = {
    "latent": DEEPSEEK,
    "sparse": {"family": "GlmMoeDsa", **GLM_DSA},
    "int8, experts": {"family": "Qwen3Moe", **MIXTURES["Qwen3Moe"]},
    "experts of one rank each": DEEPSEEK,
}

ALIKE = ("positions", "slot_mapping", "seq_lens", "pcp_slot_mapping", "pcp_gathered_rows")
"""Arrays that all ranks have to agree on."""


async def scores(ranks: Ranks, prompt: list[int]) -> list[float]:
    """The log-probability of each token of a prompt after those before it."""
    last = [each async for each in ranks.stream(prompt, 1, prompt_logprobs=1)][-1]
    return [of[token].logprob for of, token in zip(last.prompt_logprobs[1:], prompt[1:])]


async def aborted(ranks: Ranks, prompt: list[int]) -> None:
    """A request that is given up after its first token."""
    stream = ranks.stream(prompt, NUM_TOKENS)
    await anext(stream)
    await stream.aclose()


async def served(ranks: Ranks, prompts: list[list[int]], sleeps: bool) -> dict[str, Any]:
    """Tokens of all prompts, twice: the second time with the prefix cache, if there is one."""
    await ranks.ask("probe_watch")
    tokens = [await ranks.generate(prompts, NUM_TOKENS)]
    await aborted(ranks, prompts[2])
    if sleeps:
        await ranks.llm.sleep(level=1)
        await ranks.llm.wake_up()
    tokens.append(await ranks.generate(prompts, NUM_TOKENS))
    told = {what: await ranks.ask(f"probe_{what}") for what in ("counts", "facts", "noted")}
    told["records"] = await ranks.ask("record_steps", "a test")
    of_prompt = await scores(ranks, prompts[3])
    return {"tokens": tokens, "scores": of_prompt, "preempted": preemptions(), **told}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(tmp_path, seed, case):
    """Prompts in chunks beside decodes, a prompt of one token, and prefixes in the cache.

    Requests are preempted and given up, and the engine sleeps; all of it fully checked, and
    recorded by each rank.
    """
    folder = made = make_model(tmp_path / "float", **MODELS.get(case, {"num_key_value_heads": 2}))
    judge = load(folder)
    if case == "int8, experts":
        QUANTIZE(folder, made := tmp_path / "int8", "compressed-tensors")
        judge = rounded_model(folder, made, expert_ranks=2)
    prompts = prompts_of(seed, [3, 1, 90, 40, 17])
    sleeps = case == "eager"
    record = {"dir": str(tmp_path / "steps"), "steps": "last 12"}
    observed = {"additional_config": {"npu_prep": {"check": "full", "record": record}}}
    settings = CASES[case] | {"enable_sleep_mode": sleeps} | observed
    got = serve_on_ranks(made, settings, partial(served, prompts=prompts, sleeps=sleeps))
    expected = greedy_tokens(judge, prompts, NUM_TOKENS)
    assert is_varied(expected)
    assert got["tokens"] == [expected, expected]
    logits = torch.from_numpy(logits_by(judge)(prompts[3])).log_softmax(-1).numpy()
    of_prompt = [row[token] for row, token in zip(logits, prompts[3][1:])]
    # Inputs of int8 layers may come to lie a level higher or lower
    assert np.allclose(got["scores"], of_prompt, atol=0.1 if "int8" in case else 2e-3)
    assert {fact["runner"] for fact in got["facts"]} == {"V2"}
    assert (got["preempted"] > 0) == (case == "eager")
    if "compilation_config" in settings:
        assert all({"piecewise graphs", "full graph"} <= set(each) for each in got["counts"])
    for rank, told in enumerate(got["records"]):
        records = [read_record(each) for each in sorted(Path(told["folder"]).glob("*.npz"))]
        assert len(records) == 12
        own = rank // settings.get("tensor_parallel_size", 1)
        own %= settings["prefill_context_parallel_size"]
        assert {each.settings.pcp.rank for each in records} == {own}
        differences = [(core_difference(each), oracle_difference(each)) for each in records]
        assert differences == [(None, None)] * 12
    shared = [
        [(step["padding"], [step["arrays"][name] for name in ALIKE]) for step in of_rank]
        for of_rank in got["noted"]
    ]
    assert all(each == shared[0] for each in shared)
