"""Which scheduler an engine gets, what start-up says of it, and that vLLM doesn't warn of ours."""

import logging

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tests.helpers.engine import engine_config, make_model
from tests.helpers.hybrids import GATED_DELTA
from tests.scheduling.engines import draw, make
from vllm_npu_prep.scheduling.scheduler import BatchedAsyncScheduler, BatchedScheduler


class Own(AsyncScheduler):
    """A scheduler of the user's."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=1)


@pytest.fixture
def choose(model, caplog):
    """The class that an engine gets, and all that is logged meanwhile."""

    def chosen(scheduler=None, folder=model, **settings):
        options = {} if scheduler is None else {"npu_prep": {"scheduler": scheduler}}
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="vllm"):
            config = engine_config(folder, max_num_seqs=7, additional_config=options, **settings)
            kind = config.scheduler_config.get_scheduler_cls()
        return kind, "\n".join(record.getMessage() for record in caplog.records)

    return chosen


@pytest.mark.parametrize(
    ("scheduler", "asynchronous", "kind", "said"),
    [
        (None, True, BatchedAsyncScheduler, "asynchronous, batched"),
        ("batched", False, BatchedScheduler, "synchronous, batched"),
        ("upstream", True, AsyncScheduler, "asynchronous, by vLLM alone"),
        ("upstream", False, Scheduler, "synchronous, by vLLM alone"),
    ],
)
def test_the_option_chooses_the_scheduler(choose, scheduler, asynchronous, kind, said):
    chosen, log = choose(scheduler, async_scheduling=asynchronous)
    assert chosen is kind
    assert f"scheduling    {said}" in log and "not public" not in log


@pytest.mark.parametrize(
    ("caches", "asynchronous", "kind", "said"),
    [
        (True, True, AsyncScheduler, "by vLLM's scheduler: the prefix cache holds"),
        (False, False, BatchedScheduler, "batched"),
        (False, True, BatchedAsyncScheduler, "batched"),
    ],
)
def test_states_in_the_prefix_cache_are_vllm_s_scheduler_s(
    choose, tmp_path, caches, asynchronous, kind, said
):
    folder = make_model(tmp_path, "Qwen3_5", **GATED_DELTA)
    how = {"enable_prefix_caching": caches, "async_scheduling": asynchronous}
    chosen, log = choose("batched", folder, **how)
    assert chosen is kind
    assert f"synchronous, {said}" in log and ("batched" in log) == (not caches)


@pytest.mark.parametrize("caches", [False, True])
def test_states_are_batched_where_no_prefix_cache_holds_them(caches):
    sizes = {"block_size": 16, "max_model_len": 96, "budget": 96}
    scheduler = make(draw(2, groups=("full", "states"), caching=caches, **sizes), ours=True)
    reason = "recurrent states in the prefix cache end at blocks"
    assert scheduler.reason == (reason if caches else "")
    assert scheduler.needs.known


def test_a_scheduler_of_the_user_s_wins_with_a_warning(choose):
    chosen, log = choose("batched", scheduler_cls=Own)
    assert chosen is Own
    assert "by Own: --scheduler-cls takes precedence over the option scheduler" in log
    assert "not public" in log


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("connector", object(), "a connector reads every step"),
        ("num_sampled_tokens_per_step", 0, "samples no tokens"),
        ("is_encoder_decoder", True, "has an encoder"),
        ("dynamic_sd_lookup", [1], "follows the batch"),
        ("perf_metrics", object(), "MFU"),
        ("return_sampling_mask", True, "masks of sampling"),
        ("defer_block_free", True, "blocks wait"),
    ],
)
def test_engines_that_are_left_to_upstream_say_why(monkeypatch, name, value, part):
    scheduler = make(draw(2), ours=True)
    assert scheduler.reason == ""
    monkeypatch.setattr(scheduler, name, value, raising=False)
    assert part in scheduler._reason_for_upstream()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_synchronous_engines_with_stages_are_left_to_upstream(monkeypatch, asynchronous):
    """Their scheduler sends the tokens that a stage has sampled to the first one."""
    scheduler = make(draw(0, asynchronous=asynchronous), ours=True)
    monkeypatch.setattr(scheduler, "use_pp", True)
    sent = "pipeline stages send tokens to each other"
    assert (sent in scheduler._reason_for_upstream()) is not asynchronous
