"""Gated delta nets on the device beside drafts, sleep and new weights."""

from collections import Counter
from typing import Any

import pytest
from vllm.forward_context import get_forward_context

from tests.helpers.counting import ModuleCounts
from tests.helpers.engine import engine, generate, graphs, greedy, make_model, runner_of
from tests.helpers.fused import forget_layers, settings
from tests.helpers.huggingface import logits_of
from tests.helpers.hybrids import EXPERTS, ON_NPUS
from tests.helpers.mtp import make_mtp_model
from tests.helpers.prompts import prompts_of
from tests.helpers.step_logits import close_calls
from tests.helpers.v2 import RUNNERS, engine_of
from tests.helpers.watch import count_verified, record_cached
from tests.npu.close_calls import CLOSE
from tests.npu.on_device.test_hybrids import LINEAR, builders_of

DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}

OF_DRAFTS = {"Qwen3Next": (43, 5), "Qwen3_5": (38, 7)}
"""Launches of a layer of linear attention in a step in which each request has a token and three
drafts, however many requests there are, projections and norm included; and most strided inputs that
operators copy."""
OF_OTHER_DRAFTS = {"Qwen3Next": (36, 8, 4), "Qwen3_5": (31, 8, 8)}
"""Where requests have different numbers of drafts: launches, those of each request, and copies."""


OF_INTERLEAVED = {"launches": 33, "hidden_copies": 1}
"""Of such a layer of Qwen3-Next in a step of decodes: its projection interleaves heads."""


@pytest.mark.parametrize("runner_name", RUNNERS)
def test_a_layer_whose_projection_interleaves_heads_stays_within_its_budget(tmp_path, runner_name):
    """In the last step, three requests decode: one call of each operator for all of them."""
    model = make_model(tmp_path, "Qwen3Next", **{**ON_NPUS, **EXPERTS, "head_dim": 256})
    forget_layers()
    with engine_of(runner_name, model, **settings("bfloat16")) as llm:
        counted = ModuleCounts(runner_of(llm).get_model(), [LINEAR])
        generate(llm, [[5, 6, 7], [8, 4], [9, 10]], greedy(3))
    print(counted.counts)
    assert counted.counts[LINEAR] == OF_INTERLEAVED, "no other copies and no syncs"


@pytest.mark.parametrize("runner_name", RUNNERS)
@pytest.mark.parametrize("family", OF_DRAFTS)
def test_a_layer_of_drafts_stays_within_its_budget(tmp_path, family, runner_name):
    """In each step of decodes; those near the end of the context have fewer drafts."""
    sizes = {**ON_NPUS, "head_dim": 256, **(EXPERTS if family == "Qwen3Next" else {})}
    model, _ = make_mtp_model(tmp_path, family, **sizes)
    forget_layers()
    uniform, ragged = [], []
    how = settings("bfloat16") | DRAFTS
    with engine_of(runner_name, model, max_model_len=64, **how) as llm:
        layer = runner_of(llm).get_model().get_submodule(LINEAR)
        counted = ModuleCounts(runner_of(llm).get_model(), [LINEAR])

        def note(*args: Any) -> None:
            metadata = (get_forward_context().attn_metadata or {}).get(layer.prefix)
            if metadata is not None and metadata.num_prefills == 0:
                kind = uniform if metadata.uniform_decode_len else ragged
                kind.append((metadata.decode_lens, counted.counts[LINEAR]))

        layer.register_forward_hook(note)
        generate(llm, prompts_of(5, [20, 35, 37]), greedy(64))
    print(family, [counts for _, counts in uniform], ragged)
    assert {len(lens) for lens, _ in ragged} >= {2, 3}
    launches, copies = OF_DRAFTS[family]
    full = [counts for lens, counts in uniform if lens == [4, 4, 4]]
    assert len(full) > 5 and {counts["launches"] for counts in full} == {launches}
    assert max(counts.get("hidden_copies", 0) for _, counts in uniform) == copies
    launches, each, copies = OF_OTHER_DRAFTS[family]
    for lens, counts in ragged:
        assert counts["launches"] == launches + each * len(lens)
    assert max(counts["hidden_copies"] for _, counts in ragged) == copies
    for _, counts in uniform + ragged:
        assert set(counts) <= {"launches", "hidden_copies"}, "no other copies and no syncs"


def test_a_graph_for_more_drafts_than_states_is_replayed(tmp_path):
    """The operator takes as many tokens as there are states: a graph has several of its calls.

    Requests that run have states of their own, so later calls are of padding alone.
    """
    model, _ = make_mtp_model(tmp_path, "Qwen3_5", **ON_NPUS, head_dim=256)
    forget_layers()
    how = settings("bfloat16", check="full") | graphs("FULL_DECODE_ONLY", 16) | DRAFTS
    how |= {"max_model_len": 128, "max_num_seqs": 4, "num_gpu_blocks_override": 14}
    with engine(model, **how) as llm:
        generate(llm, prompts_of(5, [9, 7]), greedy(20))
        assert runner_of(llm).padding.counts.by_kind["full graph"] > 3


def test_drafts_that_end_a_block_leave_its_state_there(tmp_path):
    """Where longer prompts find it; the full check follows all states.

    Without the prefix cache no state is at the end of a block, and none has to be moved for that.
    With drafts, vLLM takes one block less than a prompt shares: of two, the first.
    """
    sizes = {**ON_NPUS, "head_dim": 256}  # blocks of 128 tokens
    model, _ = make_mtp_model(tmp_path, "Qwen3_5", **sizes)
    prompts = prompts_of(5, [122, 125])
    tokens, again, moved, longer = {}, {}, {}, []
    for keeps in (True, False):
        forget_layers()
        how = settings("bfloat16", check="full") | graphs("FULL_AND_PIECEWISE", 4, 8) | DRAFTS
        how |= {"max_num_batched_tokens": 512, "max_model_len": 384, "max_num_seqs": 2}
        how |= {"prefix_cache_retention_interval": None}  # states of decodes, too
        with engine(model, enable_prefix_caching=keeps, **how) as llm:
            verified, cached = count_verified(llm), record_cached(llm)
            tokens[keeps] = generate(llm, prompts, greedy(145))
            moved[keeps] = [builder.num_moved for builder in builders_of(runner_of(llm))]
            longer = longer or [p + t[:140] for p, t in zip(prompts, tokens[keeps])]
            cached.clear()
            again[keeps] = generate(llm, longer, greedy(8))
            kinds = Counter(runner_of(llm).padding.counts.by_kind)
        print(keeps, dict(verified), cached, moved[keeps], dict(kinds))
        assert min(verified[what] for what in ("accepted", "partly", "rejected")) > 0
        assert kinds["full graph"] > 30
        assert max(cached) == (128 if keeps else 0)
    assert tokens[True] == tokens[False]
    assert min(moved[True]) >= len(prompts) and max(moved[False]) == 0
    parted = close_calls(logits_of(model), longer, again[True], again[False], CLOSE)
    assert parted <= 1, "chunks round states elsewhere"


@pytest.mark.parametrize("runner_name", RUNNERS)
def test_new_weights_are_read_in_graphs(tmp_path, runner_name):
    """Also those of which the rule's decays and the convolution's taps are made; states are lost.

    It sleeps at level 1 before, and at level 2 when the weights come.
    """
    sizes = {**ON_NPUS, "head_dim": 256, "spread": 0.1, "embedding_scale": 20}
    old, new = (make_model(tmp_path / str(s), "Qwen3_5", seed=s, **sizes) for s in (0, 1))
    prompts = prompts_of(5, [30, 5, 41, 1])
    how = settings("bfloat16") | graphs("FULL_AND_PIECEWISE", 4, 16)
    tokens = []
    for model in (new, old):
        forget_layers()
        with engine_of(runner_name, model, **how, enable_sleep_mode=True) as llm:
            tokens.append(generate(llm, prompts, greedy(12)))
            if model == new:
                continue
            llm.sleep(level=1)
            llm.wake_up()
            assert generate(llm, prompts, greedy(12)) == tokens[1] != tokens[0]
            llm.sleep(level=2)
            llm.wake_up(tags=["weights"])
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(new)})
            llm.wake_up(tags=["kv_cache"])
            assert generate(llm, prompts, greedy(12)) == tokens[0]
