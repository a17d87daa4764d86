"""Which scheduler an engine gets, what start-up says of it, and that vLLM doesn't warn of ours."""

import logging

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tests.helpers.engine import engine_config, make_model
from tests.helpers.hybrids import GATED_DELTA
from tests.scheduling.connectors import KINDS
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
    ("asynchronous", "kind"), [(True, BatchedAsyncScheduler), (False, BatchedScheduler)]
)
def test_recurrent_states_are_scheduled_in_bulk(choose, tmp_path, asynchronous, kind):
    folder = make_model(tmp_path, "Qwen3_5", **GATED_DELTA)
    how = {"enable_prefix_caching": True, "async_scheduling": asynchronous}
    chosen, log = choose("batched", folder, **how)
    assert chosen is kind
    assert "synchronous, batched" in log


@pytest.mark.parametrize("caches", [False, True])
def test_it_is_known_when_recurrent_states_need_blocks(caches):
    sizes = {"block_size": 16, "max_model_len": 96, "budget": 96}
    scheduler = make(draw(2, groups=("full", "states"), caching=caches, **sizes), ours=True)
    assert scheduler.reason == ""
    assert scheduler.needs.known


@pytest.mark.parametrize("kind", KINDS)
def test_engines_with_a_connector_are_scheduled_in_bulk(kind):
    drawn = draw(2, groups=("full",), connector=kind)
    assert drawn.connector == kind
    assert make(drawn, ours=True).reason == ""


def test_a_scheduler_of_the_user_s_wins_with_a_warning(choose):
    chosen, log = choose("batched", scheduler_cls=Own)
    assert chosen is Own
    assert "by Own: --scheduler-cls takes precedence over the option scheduler" in log
    assert "not public" in log


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("ec_connector", object(), "an encoder connector reads every step"),
        ("aux_output_connector", object(), "routed experts are returned"),
        ("num_sampled_tokens_per_step", 0, "samples no tokens"),
        ("is_encoder_decoder", True, "has an encoder"),
        ("dynamic_sd_lookup", [1], "follows the batch"),
    ],
)
def test_engines_that_are_left_to_upstream_say_why(monkeypatch, name, value, part):
    scheduler = make(draw(2), ours=True)
    assert scheduler.reason == ""
    monkeypatch.setattr(scheduler, name, value, raising=False)
    assert part in scheduler._reason_for_upstream()
