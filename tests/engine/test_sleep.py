"""Sleep mode: memory that is given back and mapped again, and the same tokens afterwards."""

import gc
import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.conftest import SEED
from tests.helpers.engine import engine, generate, graphs, greedy, make_model
from tests.helpers.huggingface import greedy_tokens, reference
from tests.helpers.mtp import PlainDrafter, make_mtp_model, record_verified, wrong_drafts
from tests.helpers.prompts import prompts_of
from tests.helpers.quantized import QUANTIZE, change_tensors, rounded_drafter
from tests.helpers.v2 import RUNNERS, engine_of
from vllm_npu_prep.runner import new_weights

LENGTHS = [30, 5, 41, 17, 33]
CACHE = 96 << 20


@pytest.fixture(scope="module")
def expected(qwen3):
    return reference(qwen3, prompts_of(SEED, LENGTHS), 20)


def resident():
    gc.collect()
    return psutil.Process().memory_info().rss


def use(caches):
    """Take every page of a cache, as after long use."""
    for region in caches:
        region.data.fill_(1)
        region.data.zero_()


def worker_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_engine_sleeps_and_gives_the_same_tokens(qwen3, expected, tmp_path, runner):
    """Both levels, tags, new weights while it sleeps; graphs read what is at their addresses."""
    prompts = prompts_of(SEED, LENGTHS)
    other = make_model(tmp_path / "other", seed=1)
    settings = graphs("FULL_DECODE_ONLY", 1, 4, 8, kv_cache_memory_bytes=CACHE)
    with engine_of(runner, qwen3, block_size=8, enable_sleep_mode=True, **settings) as llm:
        memory = worker_of(llm).sleep_mode_backend
        weights, caches = memory._regions["weights"], memory._regions["kv_cache"]
        assert sum(region.data.numel() for region in caches) > 0.99 * CACHE
        use(caches)
        assert generate(llm, prompts, greedy(20)) == expected
        awake = resident()
        size = sum(region.data.numel() for region in weights + caches)
        llm.sleep(level=1)
        assert awake - resident() > 0.97 * size
        assert llm.llm_engine.is_sleeping()
        llm.wake_up(tags=["weights"])
        assert llm.llm_engine.is_sleeping()
        llm.wake_up(tags=["kv_cache"])
        assert not any(region.data.any() for region in caches)
        assert generate(llm, prompts, greedy(20)) == expected
        use(caches)
        assert abs(resident() - awake) < 0.01 * awake
        llm.sleep(level=2)
        assert awake - resident() > 0.97 * size
        llm.wake_up(tags=["weights"])
        assert not any(region.data.any() for region in weights)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        llm.wake_up(tags=["kv_cache"])
        assert generate(llm, prompts, greedy(20)) == reference(other, prompts, 20)


def test_released_caches_and_weights_that_level_2_spares(qwen3, expected, caplog):
    prompts = prompts_of(SEED, LENGTHS)
    settings = {"block_size": 8, "sleep_preserve_parameter_names": ["*"]}
    with engine(qwen3, enable_sleep_mode=True, **settings) as llm:
        llm.sleep(level=0)
        llm.release_kv_cache_memory()
        assert llm.llm_engine.is_sleeping()
        llm.wake_up()
        assert generate(llm, prompts, greedy(20)) == expected
        with caplog.at_level(logging.INFO, logger="vllm"):
            llm.sleep(level=2)
        assert "(kept: *): after wake_up, call reload_weights" in caplog.text
        llm.wake_up()
        assert generate(llm, prompts, greedy(20)) == expected


class Drafting(NamedTuple):
    """Int8 models that draft with an MTP layer of their own, which shares embeddings and head."""

    model: Path
    other: Path  # another one of its shape
    of_other: PlainDrafter  # a plain reading of the other's MTP layer
    without: Path  # the other without that layer


def drafting_models(folder: Path) -> Drafting:
    models = [make_mtp_model(folder / str(seed), "DeepseekV3", seed=seed) for seed in (0, 1)]
    (model, _), (other, of_other) = models
    folders = [folder / f"int8 {seed}" for seed in (0, 1)]
    for each, rounded in zip((model, other), folders, strict=True):
        QUANTIZE(each, rounded, "modelslim", False)
    of_other = rounded_drafter(other, folders[1], of_other)
    without = Path(shutil.copytree(folders[1], folder / "without"))
    change_tensors(without, lambda tensors: forget(tensors, "model.layers.2."))
    return Drafting(*folders, of_other, without)


def forget(tensors: dict[str, Any], prefix: str) -> None:
    """Leave out what begins so."""
    for name in [name for name in tensors if name.startswith(prefix)]:
        del tensors[name]


RELOAD = "reload_weights"


def life_cycle(llm, model, other):
    """Do to an engine all that leaves its weights as they were, and say each time what it was."""
    core, reload = llm.llm_engine.engine_core.engine_core, partial(llm.collective_rpc, RELOAD)
    llm.sleep(level=1)
    llm.wake_up(tags=["weights"])
    llm.wake_up(tags=["kv_cache"])
    yield "level 1"
    llm.sleep(level=2)
    llm.wake_up()
    reload()
    yield "level 2"
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    reload(kwargs={"weights_path": str(other)})
    reload(kwargs={"weights_path": str(model)})
    llm.wake_up(tags=["kv_cache"])
    yield "level 2, and other weights before the old ones"
    llm.sleep(level=0)
    while core.batch_queue:  # the step after the last tokens
        llm.llm_engine.step()
    llm.release_kv_cache_memory()
    llm.wake_up()
    yield "no cache for a while"


@pytest.mark.parametrize("runner", RUNNERS)
def test_drafts_are_accepted_as_before_after_sleeps(tmp_path, monkeypatch, runner):
    """Tokens would be right without a drafter, too. MTP layers change with the model's weights.

    Files that lack such a layer leave the one that was there, and a line says so.
    """
    warned: list[str] = []
    monkeypatch.setattr(
        new_weights.logger, "warning", lambda text, *args: warned.append(text % args)
    )
    made, prompts = drafting_models(tmp_path), prompts_of(SEED, LENGTHS[:3])
    settings = graphs("FULL_DECODE_ONLY", 4, 8, 16, enable_sleep_mode=True, block_size=16)
    settings["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 3}
    with engine_of(runner, made.model, **settings) as llm:
        records = record_verified(llm)

        def verified():
            """Tokens, and how many of the drafts after each sequence were accepted."""
            records.clear()
            return generate(llm, prompts, greedy(12)), {
                tuple(step.token_ids): step.num_accepted for step in records
            }

        before = verified()
        accepted = sum(before[1].values())
        assert accepted > 0 and 0 in before[1].values()
        for what in life_cycle(llm, made.model, made.other):
            assert verified() == before, what
        llm.collective_rpc(RELOAD, kwargs={"weights_path": str(made.other)})
        assert llm.reset_prefix_cache()
        expected = greedy_tokens(made.of_other.target, prompts, 15)
        new = verified()
        assert new[0] == [row[:12] for row in expected]
        assert records and not wrong_drafts(
            made.of_other, records, [a + b for a, b in zip(prompts, expected)]
        )
        assert sum(new[1].values()) > 0
        assert not warned
        llm.sleep(level=2)
        llm.wake_up()
        llm.collective_rpc(RELOAD, kwargs={"weights_path": str(made.without)})
        assert "New weights: the drafter keeps its old ones" in warned[0]
        assert verified() == new
