"""MLA through vLLM's engine: greedy tokens are those of transformers, in every state and mask."""

from collections import Counter
from typing import Any

import pytest
from transformers import DeepseekV3Config
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

from tests.engine.test_record import DRAFT_ARRAYS, check, records_in
from tests.helpers.cache import CacheWatch
from tests.helpers.engine import generate, graphs, greedy, make_model, runner_of
from tests.helpers.forced_messages import Forced
from tests.helpers.huggingface import is_varied, reference
from tests.helpers.latent import GLM_FLASH, GROUPED_EXPERTS, KIMI_K2, LATENT, V3_EXPERTS, as_kimi_k2
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import ALSO_V2, engine_of, on_both
from tests.helpers.watch import count_preemptions, count_states, on_prepared
from vllm_npu_prep.cli import main

V2 = {**LATENT, **GROUPED_EXPERTS, "q_lora_rank": None, "topk_method": "group_limited_greedy"}


@pytest.fixture(autouse=True)
def deepseek_keeps_its_name():
    """vLLM renames transformers' class for Kimi K2, for the whole process."""
    yield
    DeepseekV3Config.model_type = "deepseek_v3"


def count_halves(llm: Any) -> Counter[str]:
    """Counts from now on how steps are split; contexts are read in chunks of four blocks."""
    runs: Counter[str] = Counter()

    def count(step: Any) -> None:
        latent = step.latent
        if step.shape.latent:
            runs["prefills"] += latent.num_prefills > 0
            runs["both"] += latent.num_prefills > 0 and latent.num_decodes > 0
            runs["several chunks"] += latent.num_chunks > 1
            short = step.query_lens <= step.shape.latent.decode_threshold
            runs["short prefills"] += int(short.sum()) > latent.num_decodes

    on_prepared(llm, count)
    return runs


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Contexts are read four blocks at a time."""

    def workspace(vllm_config: Any) -> int:
        return 4 * vllm_config.cache_config.block_size

    name = "determine_chunked_prefill_workspace_size"
    monkeypatch.setattr(MLACommonMetadataBuilder, name, staticmethod(workspace))


MODELS = {
    # Queries through a low rank; experts by sigmoid, bias and groups
    "DeepSeek V3": ("DeepseekV3", {"q_lora_rank": 20, **LATENT, **V3_EXPERTS}),
    # Queries without a low rank; experts by softmax and groups, not renormalised
    "DeepSeek V2": ("DeepseekV2", {**V2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}),
    # Stretches positions by YaRN
    "Kimi K2": ("DeepseekV3", {"q_lora_rank": 20, **LATENT, **KIMI_K2}),
    # Five heads and wide values
    "GLM-4.7-Flash": ("Glm4MoeLite", {"q_lora_rank": 20, **LATENT, "v_head_dim": 24, **GLM_FLASH}),
}


@pytest.mark.parametrize(("name", "runner"), on_both({name: name for name in MODELS}))
def test_tokens_are_those_of_transformers(tmp_path, seed, name, runner):
    """Chunks of prompts, then the same prompts from the prefix cache, in graphs.

    The full check names what is broken in a step.
    """
    family, config = MODELS[name]
    folder = make_model(tmp_path / "model", family, **config)
    prompts = prompts_of(seed, [3, 1, 90, 40, 17])
    with engine_of(
        runner,
        as_kimi_k2(folder) if name == "Kimi K2" else folder,
        block_size=16,
        max_num_batched_tokens=48,
        max_num_seqs=7,
        enable_prefix_caching=True,
        additional_config={"npu_prep": {"check": "full"}},
        **graphs("FULL_AND_PIECEWISE", 1, 4, 8, 16),
    ) as llm:
        watch, runs, forced = CacheWatch(runner_of(llm)), count_halves(llm), Forced(llm)
        got = [generate(llm, prompts, greedy(16)) for _ in range(2)]
        counts = runner_of(llm).padding.counts.by_kind
    expected = reference(folder, prompts, 16)
    assert got == [expected] * 2
    assert is_varied(expected)
    assert not forced.wrong("all", "latent", "full graphs")
    assert {"full graph", "piecewise graphs"} <= set(counts)
    assert watch.padding_seen - {0}
    assert runs["both"] and runs["several chunks"], dict(runs)
    assert runner == "V1" or not runs["short prefills"], "on V2 all short ones are decodes"


@pytest.mark.parametrize("runner", ALSO_V2)
def test_dense_layers_with_preemption_and_drafts(tmp_path, seed, capsys, runner):
    """A cache too small for the batch; ngram drafts, verified in one step.

    Core and oracle prepare each step again from its record.
    """
    steps = tmp_path / "steps"
    record = {"dir": str(steps), "steps": "0:1000"}
    options = {"check": "full", "record": record}
    folder = make_model(
        tmp_path / "model", "DeepseekV2", spread=0.15, first_k_dense_replace=2, **V2
    )
    prompts = prompts_of(seed, [30, 28, 25, 31, 22, 29])
    with engine_of(
        runner,
        folder,
        block_size=4,
        num_gpu_blocks_override=40,
        max_model_len=96,
        max_num_batched_tokens=48,
        additional_config={"npu_prep": options},
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2},
    ) as llm:
        states, count, runs = (count_states(llm), count_preemptions(llm), count_halves(llm))
        got = generate(llm, prompts, greedy(40))
    assert got == reference(folder, prompts, 40)
    assert count["preempted"] > 0
    assert "SpecDecoding" in states
    assert "DecodeOnly" in states or runner == "V2", "on V2, ngram drafts in every step"
    assert runs["prefills"] and runs["several chunks"], dict(runs)

    records = records_in(steps)
    check(records, *DRAFT_ARRAYS)
    assert all(record.settings.latent is not None for record in records)
    pieces = [record.prepared.get("context_piece_reqs_padded") for record in records]
    assert any(each is not None and each.any() for each in pieces)
    chunks = [int(record.prepared["latent.num_chunks"]) for record in records]
    number = records[chunks.index(max(chunks))].number
    assert main(["explain", str(steps), "--step", str(number)]) == 0
    assert f"{max(chunks)} chunks" in " ".join(capsys.readouterr().out.split())
