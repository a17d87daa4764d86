"""Gated delta nets beside attention: greedy tokens are those of transformers.

A request's state lives in a block that another request, or attention, had before: if anything of it
were read, tokens would differ.
"""

from typing import Any

import pytest

from tests.conftest import SEED
from tests.engine.test_record import check, records_in
from tests.helpers.engine import REPLAYED, generate, graphs, greedy, make_model, runner_of
from tests.helpers.forced_messages import Forced
from tests.helpers.huggingface import is_varied, reference
from tests.helpers.hybrids import EXPERTS, GATED_DELTA, QWEN3_NEXT
from tests.helpers.mtp import make_mtp_model
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import RUNNERS, engine_of, on_both
from tests.helpers.watch import count_preemptions, count_states, count_verified
from vllm_npu_prep.records.comparison import core_difference, oracle_difference

MAX_TOKENS = 16


CASES = {  # family, its config, asynchronous, graph mode, other settings
    "Qwen3Next-sync": (
        "Qwen3Next",
        QWEN3_NEXT,
        False,
        None,
        {"enable_prefix_caching": False, "num_gpu_blocks_override": 26},
    ),
    "Qwen3_5Moe-async-graphs": (
        "Qwen3_5Moe",
        {**GATED_DELTA, **EXPERTS},
        True,
        "FULL_AND_PIECEWISE",
        {"enable_prefix_caching": True, "num_gpu_blocks_override": 40},
    ),
}


@pytest.mark.parametrize(
    ("family", "config", "asynchronous", "mode", "settings", "runner"), on_both(CASES)
)
def test_tokens_equal_transformers(tmp_path, family, config, asynchronous, mode, settings, runner):
    """In chunks of prompts, mixed with decodes, preempted, from the prefix cache, in graphs.

    The full check follows states, and names what is broken in one; core, oracle and upstream
    prepare each step again from its record.
    """
    folder, records = make_model(tmp_path / "model", family, **config), tmp_path / "records"
    prompts = prompts_of(SEED, [3, 1, 90, 40, 17])
    prompts.append(prompts[2][:80] + prompts[3])
    expected = reference(folder, prompts, MAX_TOKENS)
    assert is_varied(expected)
    record = {"dir": str(records), "steps": "0:1000"}
    with engine_of(
        runner,
        folder,
        block_size=16,
        max_num_batched_tokens=48,
        max_num_seqs=5,
        async_scheduling=asynchronous,
        additional_config={"npu_prep": {"check": "full", "record": record}},
        **settings,
        **(graphs(mode, 1, 4, 8, 16, 48) if mode else {}),
    ) as llm:
        runner = runner_of(llm)
        states, preempted = count_states(llm), count_preemptions(llm)
        forced = Forced(llm)
        got = [generate(llm, prompts, greedy(MAX_TOKENS)) for _ in range(2)]
        counts = runner.padding.counts.by_kind
        groups = runner.preparer.tables.shape.states.groups
        cached = runner.cache_config.mamba_cache_mode
    assert got == [expected] * 2
    assert len(groups) == 3, "the fourth group is attention's"
    assert (cached == "align") == settings["enable_prefix_caching"]
    assert (preempted["preempted"] > 0) == ("num_gpu_blocks_override" in settings)
    assert states["ChunkedPrefill"] > 0 and states["DecodeOnly"] > 0
    assert mode is None or set(counts) >= REPLAYED[mode]
    kinds = ("all", "states", "async" if asynchronous else "sync")
    assert not forced.wrong(*kinds, *(["full graphs"] if mode else []))

    recorded = records_in(records)
    check(recorded)
    assert all(len(record.settings.shape.states.groups) == 3 for record in recorded)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_prompt_of_one_token_begins_with_drafts(tmp_path, runner):
    """Behind a longer one, while others decode; each draft's place has a state of its own."""
    folder = make_mtp_model(tmp_path, "Qwen3_5")[0]
    prompts, began = prompts_of(SEED, [9, 40, 1, 1]), []
    expected = reference(folder, prompts, 12)
    with engine_of(
        runner,
        folder,
        block_size=16,
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
        additional_config={"npu_prep": {"check": "full"}},
    ) as llm:
        core, tokens = llm.llm_engine, {}
        scheduler = core.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def watched(*args: Any) -> Any:
            step = schedule(*args)
            new = [each.req_id for each in step.scheduled_new_reqs]
            began.append([step.scheduled_spec_decode_tokens.get(name, []) for name in new])
            return step

        scheduler.schedule = watched
        for number, prompt in enumerate(prompts):
            core.add_request(str(number), {"prompt_token_ids": prompt}, greedy(12))
            for _ in range(3 * (number == 0)):
                core.step()
        while core.has_unfinished_requests():
            for output in core.step():
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
    assert [[], [-1, -1], [-1, -1]] in began
    assert [tokens[number] for number in range(len(prompts))] == expected


REPEATS = {"spread": 0.1, "embedding_scale": 20}
"""Weights that make greedy tokens repeat themselves."""


@pytest.mark.parametrize("runner", RUNNERS)
def test_drafts_that_are_looked_up_leave_no_trace_in_states(tmp_path, runner):
    """Of text that repeats itself (ngram): accepted, partly accepted and rejected.

    Core and oracle prepare each step again from its record.
    """
    folder = make_model(tmp_path / "model", "Qwen3_5", **GATED_DELTA, **REPEATS)
    asked = [prompt * 3 for prompt in prompts_of(SEED, [3, 17, 25])] + prompts_of(SEED, [30, 1])
    expected = reference(folder, asked, 40)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    records = tmp_path / "records"
    with engine_of(
        runner,
        folder,
        speculative_config={**drafts, "prompt_lookup_min": 1},
        block_size=16,
        max_num_batched_tokens=48,
        max_num_seqs=5,
        enable_prefix_caching=False,
        additional_config={
            "npu_prep": {"check": "full", "record": {"dir": str(records), "steps": "0:1000"}}
        },
    ) as llm:
        verified, forced = count_verified(llm), Forced(llm)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        assert (scheduler.reason, scheduler.needs.known) == ("", True), "it is batched"
        assert generate(llm, asked, greedy(40)) == expected
    assert min(verified[what] for what in ("accepted", "partly", "rejected")) > 0
    assert not forced.wrong("all", "states", "drafts", "states drafts")
    for record in records_in(records):
        assert core_difference(record) is None and oracle_difference(record) is None
