"""Multi-token prediction: the tokens of transformers, and the drafts of a plain reading.

Not only tokens are compared: in every step, exactly those drafts are made and accepted that
`tests.helpers.mtp.PlainDrafter` makes of the whole sequence. So an input of a draft pass that is
off in any way is seen, though verification hides it from the tokens.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch

from tests.conftest import SEED
from tests.helpers.engine import REPLAYED, generate, graphs, greedy, runner_of
from tests.helpers.forced_messages import Forced
from tests.helpers.huggingface import is_varied, reference
from tests.helpers.mtp import FAMILIES, make_mtp_model, record_verified, wrong_drafts
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import engine_of, on_both
from tests.helpers.watch import count_preemptions, count_states, count_verified, record_cached
from vllm_npu_prep.runner import mtp_layers
from vllm_npu_prep.startup.asked import MTP_MODELS

NUM_DRAFTS = 3
MAX_TOKENS = 20


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable[..., Any]:
    """Function of a family: its model, the plain reading, prompts and what transformers makes."""
    kept: dict[str, Any] = {}

    def make(family: str) -> Any:
        if family not in kept:
            folder, drafter = make_mtp_model(tmp_path_factory.mktemp(family), family)
            prompts = prompts_of(SEED, [3, 1, 70, 40, 17, 30])
            # Parts within a block. Where prompts part between two, the drafter's row of the block's
            # last token is the first prompt's: block hashes know no later token.
            prompts.append(prompts[2][:62] + prompts[3])
            tokens = reference(folder, prompts, MAX_TOKENS + NUM_DRAFTS)
            assert is_varied(tokens)
            kept[family] = folder, drafter, prompts, tokens
        return kept[family]

    return make


def drafts(num_drafts: int = NUM_DRAFTS, **config: Any) -> dict[str, Any]:
    """Settings of an engine that drafts with its model's MTP layers."""
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": num_drafts, **config}}


SMALL = {"block_size": 4, "num_gpu_blocks_override": 56}  # too few blocks for all requests
# A state of each draft; no prefix cache, so the full check follows what each block holds
STATES = {"block_size": 16, "enable_prefix_caching": False}
CACHED_STATES = {"block_size": 16, "enable_prefix_caching": True}
# States of decodes, too, which requests that were preempted come back to
CACHED_AND_FEW = CACHED_STATES | {
    "max_num_seqs": 3,
    "num_gpu_blocks_override": 36,
    "prefix_cache_retention_interval": None,
}
CHECKED = {"npu_prep": {"check": "full"}}
UNPADDED = "disable_padded_drafter_batch"
BLOCKS, PIECES = {"block_size": 16}, "FULL_AND_PIECEWISE"
CASES = {  # family, asynchronous, graph mode, other settings
    "MiMo-async-None": ("MiMo", True, None, SMALL),
    "MiMo-sync-FULL_AND_PIECEWISE": ("MiMo", False, PIECES, BLOCKS),
    "MiMo-async-FULL": ("MiMo", True, "FULL", BLOCKS),
    "Glm4Moe-sync-None": ("Glm4Moe", False, None, SMALL),
    "DeepseekV3-sync-None": ("DeepseekV3", False, None, SMALL),
    "DeepseekV3-async-FULL_AND_PIECEWISE": ("DeepseekV3", True, PIECES, BLOCKS),
    "DeepseekV32-sync-None": ("DeepseekV32", False, None, SMALL),
    "DeepseekV32-async-FULL_AND_PIECEWISE": ("DeepseekV32", True, PIECES, BLOCKS),
    "GlmMoeDsa-sync-None": ("GlmMoeDsa", False, None, SMALL),
    "GlmMoeDsa-async-FULL_AND_PIECEWISE": ("GlmMoeDsa", True, PIECES, BLOCKS),
    "Qwen3Next-async-None": ("Qwen3Next", True, None, STATES | {"num_gpu_blocks_override": 30}),
    "Qwen3_5-sync-FULL_AND_PIECEWISE": ("Qwen3_5", False, PIECES, STATES),
    "Qwen3_5Moe-sync-PIECEWISE": ("Qwen3_5Moe", False, "PIECEWISE", STATES),
    # A state at the end of each block, where the next round finds it
    "Qwen3Next-sync-None-cached": ("Qwen3Next", False, None, CACHED_STATES),
    # The same, and requests that lose theirs come back to what the cache has kept of it
    "Qwen3_5-async-FULL_DECODE_ONLY-cached": ("Qwen3_5", True, "FULL_DECODE_ONLY", CACHED_AND_FEW),
}


@pytest.mark.parametrize(
    ("family", "asynchronous", "mode", "settings", "runner"),
    [
        *on_both(CASES),
        pytest.param(
            "MiMo", False, None, {**BLOCKS, UNPADDED: True}, "V1", id="MiMo-sync-unpadded"
        ),
    ],
)
def test_tokens_and_accepted_drafts(made, family, asynchronous, mode, settings, runner):
    """In chunks of prompts, from the prefix cache, preempted, in graphs.

    The full check names what is broken in steps of states and drafts.
    """
    folder, drafter, prompts, tokens = made(family)
    settings = {"enable_prefix_caching": True, "max_num_seqs": 5, **settings}
    caches = settings["enable_prefix_caching"]
    if family.startswith("Qwen"):
        settings["additional_config"] = CHECKED
    config = {UNPADDED: settings.pop(UNPADDED)} if UNPADDED in settings else {}
    with engine_of(
        runner,
        folder,
        max_model_len=128,
        max_num_batched_tokens=48,
        async_scheduling=asynchronous,
        **settings,
        **drafts(**config),
        **(graphs(mode, 1, 4, 8, 20, 48) if mode else {}),
    ) as llm:
        states, preempted = count_states(llm), count_preemptions(llm)
        verified, records = count_verified(llm), record_verified(llm)
        cached, resumed = record_cached(llm), record_cached(llm, of_resumed=True)
        forced = Forced(llm) if family.startswith("Qwen") and asynchronous else None
        got = [generate(llm, prompts, greedy(MAX_TOKENS)) for _ in range(2)]
        runner = runner_of(llm)
        counts = dict(runner.padding.counts.by_kind)
        assert runner.scheduler_config.async_scheduling == asynchronous
        before = [cache.clone() for cache in runner.kv_caches]
        runner._dummy_run(20)  # as an engine that idles beside others
        unwritten = [torch.equal(a, b) for a, b in zip(before, runner.kv_caches)]
    assert unwritten and all(unwritten)
    assert got == [[row[:MAX_TOKENS] for row in tokens]] * 2
    assert records and not wrong_drafts(drafter, records, [a + b for a, b in zip(prompts, tokens)])
    assert min(verified[what] for what in ("accepted", "partly", "rejected")) > 0
    assert (preempted["preempted"] > 0) == ("num_gpu_blocks_override" in settings)
    assert states["ChunkedPrefill"] > 0
    assert not caches or max(cached) > 0 or settings["block_size"] == 128
    assert mode is None or set(counts) >= REPLAYED[mode]
    kinds = ("all", "states", "drafts", "states drafts", "async", "async drafts")
    assert forced is None or not forced.wrong(*kinds)
    if settings.keys() >= CACHED_AND_FEW.keys():
        assert max(resumed) >= 16, "states that a preempted request found again"


@pytest.mark.parametrize(
    ("family", "asynchronous", "runner"),
    on_both({"sync": ("MiMo", False), "async": ("MiMo", True), "states": ("Qwen3_5", True)}),
)
def test_drafts_stop_at_the_end_of_the_context(made, family, asynchronous, runner):
    """Every length up to `max_model_len`; a budget that cuts drafts and prompts."""
    folder, drafter, *_ = made(family)
    prompts = prompts_of(SEED, [5, 50, 61, 62, 63])
    expected = [reference(folder, [each], 64 + NUM_DRAFTS - len(each))[0] for each in prompts]
    with engine_of(
        runner,
        folder,
        max_model_len=64,
        max_num_seqs=5,
        max_num_batched_tokens=13,
        block_size=8,
        async_scheduling=asynchronous,
        enable_prefix_caching=family != "Qwen3_5",
        **drafts(),
    ) as llm:
        records = record_verified(llm)
        got = generate(llm, prompts, greedy(100))
    assert got == [row[:-NUM_DRAFTS] for row in expected]
    assert records and not wrong_drafts(
        drafter, records, [a + b for a, b in zip(prompts, expected)]
    )
    assert max(len(step.token_ids) + len(step.drafts) for step in records) == 63
    assert {len(step.drafts) for step in records} == {1, 2, 3}, "fewer near the end"


OTHERS = {  # family, its config, settings of the engine, drafts
    "of two layers the first": ("Glm4Moe", {"num_layers": 2}, {}, 4),
    "the embeddings are its head": (
        "MiMo",
        {"tie_word_embeddings": True, "spread": 0.25, "embedding_scale": 5.0},
        {"async_scheduling": False},
        NUM_DRAFTS,
    ),
}


@pytest.mark.parametrize(("which", "runner"), on_both({which: which for which in OTHERS}))
def test_layers_of_other_models_draft(tmp_path, seed, monkeypatch, which, runner):
    family, config, settings, num_drafts = OTHERS[which]
    folder, drafter = make_mtp_model(tmp_path / "text", family, **config)
    prompts = prompts_of(seed, [3, 1, 40, 17])
    tokens = reference(folder, prompts, MAX_TOKENS + num_drafts)
    assert is_varied(tokens)
    warned: list[str] = []
    monkeypatch.setattr(
        mtp_layers.logger, "warning", lambda text, *args: warned.append(text % args)
    )
    settings = {"max_num_batched_tokens": 32, **settings, **drafts(num_drafts)}
    with engine_of(runner, folder, **settings) as llm:
        records = record_verified(llm)
        got = generate(llm, prompts, greedy(MAX_TOKENS))
    assert got == [row[:MAX_TOKENS] for row in tokens]
    assert records and not wrong_drafts(drafter, records, [a + b for a, b in zip(prompts, tokens)])
    accepted = {step.num_accepted for step in records}
    assert min(accepted) == 0 < max(accepted)
    assert ["the model has 2 MTP layers; the first one drafts" in each for each in warned] == (
        [True] if which == "of two layers the first" else []
    )


def test_every_family_has_a_plain_reading():
    assert {name.removesuffix("ForCausalLM") for name in chain(*MTP_MODELS.values())} == {*FAMILIES}
