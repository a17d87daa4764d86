"""What the supported releases of vLLM do differently, as the rest of the plugin gets to know it."""

from importlib import metadata
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer import kv_transfer_state

from vllm_npu_prep.compat import kv_connector
from vllm_npu_prep.compat.releases import (
    SUPPORTED_VLLM,
    TORCH,
    SchedulerRules033,
    is_since,
    note_on_torch,
    ray_compiles_graphs,
    scheduler_rules,
)
from vllm_npu_prep.errors import PrepError


def test_each_release_has_its_own_rules():
    assert type(scheduler_rules("0.32.0")).__name__ == "SchedulerRules"
    assert isinstance(scheduler_rules("0.33.0"), SchedulerRules033)
    assert SUPPORTED_VLLM == ("0.32.0", "0.33.0")


def test_releases_are_compared_by_their_numbers():
    assert is_since("0.33.0", "0.33.0") and is_since("0.33.0", "0.100.1")
    assert not is_since("0.33.0", "0.32.9")


def test_start_up_says_with_which_torch_a_release_was_tested():
    assert note_on_torch("0.32.0") == ""
    assert "pins torch 2.14.0" in note_on_torch("0.33.0") and TORCH in note_on_torch("0.33.0")
    assert f'torch=={TORCH}; extra == "serve"' in (metadata.requires("vllm_npu_prep") or ())


@pytest.mark.parametrize(("interval", "begins"), [(1, []), (4, ["prefills wait"])])
def test_steps_that_vllm_0_33_decides_by_all_are_left_to_it(interval, begins):
    scheduler = SimpleNamespace(local_prefill_interval=interval)
    reasons = SchedulerRules033().reasons_for_upstream(scheduler)
    assert [reason[:13] for reason, holds in reasons.items() if holds] == begins


@pytest.mark.parametrize(
    ("outputs", "placeholders", "entered", "last", "skips"),
    [
        (5, 3, True, 6, True),  # the step samples the last token, beside two drafts
        (5, 3, True, 7, False),
        (5, 6, True, 7, True),  # a step in flight samples the one before it
        (5, 6, True, 8, False),
        (5, 3, False, 7, True),  # the same, as a connector sees it
        (5, 3, False, 8, False),
    ],
)
def test_drafts_that_no_step_will_verify_are_left_out(outputs, placeholders, entered, last, skips):
    fields = {"num_output_tokens": outputs, "num_output_placeholders": placeholders}
    ends, stays = (SimpleNamespace(**fields, max_tokens=most) for most in (6, last))
    scheduler = SimpleNamespace(
        requests={"a": ends, "b": stays},
        num_executed_steps=0,
        use_v2_model_runner=False,
        can_skip_drafts=True,
    )
    output = SimpleNamespace(num_scheduled_tokens={"a": 3, "b": 3}, skip_drafts=True)
    SchedulerRules033().complete(scheduler, output, ["a", "b"], entered)
    assert output.skip_drafts is skips


@pytest.mark.parametrize(
    ("scheduled", "taken", "counted"),
    [(["a"], ["a"], 1), (["a", "b"], ["a"], 0), ([], [], 0)],
)
def test_a_step_counts_as_executed_if_upstream_saw_none_of_it(scheduled, taken, counted):
    scheduler = SimpleNamespace(num_executed_steps=0, use_v2_model_runner=False)
    output = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(scheduled, 1), skip_drafts=False)
    SchedulerRules033().complete(scheduler, output, taken, entered=True)
    assert scheduler.num_executed_steps == counted


def test_encoder_inputs_that_upstream_did_not_see_are_told():
    asked = []
    scheduler = SimpleNamespace(
        num_executed_steps=0,
        use_v2_model_runner=True,
        _get_encoder_input_updates=lambda ids, new, encoding: asked.append(ids) or {"a": {0: None}},
    )
    output = SimpleNamespace(
        num_scheduled_tokens={"a": 1, "b": 1}, skip_drafts=False, encoder_input_updates={"b": {}}
    )
    SchedulerRules033().complete(scheduler, output, ["a"], entered=True)
    assert list(asked[0]) == ["a"]
    assert output.encoder_input_updates == {"b": {}, "a": {0: None}}


def test_ray_compiles_graphs_where_vllm_has_that_executor(monkeypatch):
    from vllm import envs

    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    assert ray_compiles_graphs() == hasattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND")


class Connector:
    """Notes what it is told, as a connector of vLLM 0.33.0 or later."""

    def __init__(self, told: list[str]) -> None:
        self.unregister_kv_caches = lambda: told.append("unregister")
        self.restore_kv_caches = lambda: told.append("restore")


@pytest.fixture
def sleeper(monkeypatch):
    """A worker of a connector, and what happened in order."""
    from vllm_npu_prep.worker import NPUWorker

    told: list[str] = []
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", Connector(told))
    memory = SimpleNamespace(
        unmap=lambda level: [told.append("unmap")],
        restore=lambda regions: told.append("restore memory"),
        map=lambda tags: [told.append("map")],
    )
    worker = SimpleNamespace(
        sleep_mode_backend=memory,
        _sleeping=memory,
        _sleep_saved_parameters={},
        _prepare_sleep=lambda level: None,
        parallel_config=SimpleNamespace(world_size=1, rank=0),
        model_config=SimpleNamespace(quantization=None),
        prep_device=SimpleNamespace(memory_info=lambda: (0, 0), synchronize=lambda: None),
        sleep=lambda level: NPUWorker.sleep(worker, level),
        wake_up=lambda tags: NPUWorker.wake_up(worker, tags),
    )
    return worker, told


@pytest.mark.parametrize("version", SUPPORTED_VLLM)
def test_connectors_are_told_when_the_cache_sleeps_and_wakes(version, sleeper, monkeypatch):
    worker, told = sleeper
    monkeypatch.setattr(kv_connector, "is_since", lambda release: is_since(release, version))
    worker.sleep(1)
    worker.wake_up(["weights"])
    worker.wake_up(["kv_cache"])
    worker.wake_up(None)
    tells = {
        "0.32.0": ["unmap", "map", "map", "map"],
        "0.33.0": ["unregister", "unmap", "map"] + ["map", "restore"] * 2,
    }
    assert told == tells[version]


def test_a_connector_has_its_cache_again_after_a_failed_sleep(sleeper, monkeypatch):
    worker, told = sleeper
    monkeypatch.setattr(kv_connector, "is_since", lambda release: True)

    def fail(level: int) -> None:
        raise PrepError("no room")

    worker.sleep_mode_backend.unmap = fail
    with pytest.raises(PrepError, match="no room"):
        worker.sleep(1)
    assert told == ["unregister", "restore memory", "restore"]
