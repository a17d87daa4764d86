"""Steps of real engines, recorded and prepared again; faults planted in between are found."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.conftest import SEED
from tests.helpers.drafters import make_eagle_head
from tests.helpers.engine import generate, graphs, greedy, make_model, runner_of
from tests.helpers.prompts import prompts_of
from tests.helpers.v2 import ALSO_V2, engine_of
from tests.helpers.vision import chat, make_image, serve
from tests.helpers.watch import count_preemptions
from tests.helpers.windows import THREE_GROUPS, WINDOW
from vllm_npu_prep.cli import main
from vllm_npu_prep.observe.violation import StepCheckError
from vllm_npu_prep.prep.checks import Rule
from vllm_npu_prep.records.comparison import core_difference, oracle_difference
from vllm_npu_prep.records.contract import prepared_arrays
from vllm_npu_prep.records.record_file import read_record, record_files
from vllm_npu_prep.runner.v1 import runner as v1_runner
from vllm_npu_prep.runner.v2 import runner as v2_runner
from vllm_npu_prep.server import one_line

PREPARED_BY = {"V1": v1_runner, "V2": v2_runner}
"""Where each runner names `prepare_step`."""


def recording(folder: Path, steps: str, check: str = "cheap", **options) -> dict:
    return {"npu_prep": {"record": {"dir": str(folder), "steps": steps, **options}, "check": check}}


def records_in(folder: Path) -> list:
    return [read_record(path) for path in record_files(folder)]


DRAFT_ARRAYS = (
    "draft_token_ids_padded",
    "target_logits_indices_padded",
    "bonus_logits_indices_padded",
    "cu_num_draft_tokens_padded",
    "cu_num_sampled_tokens_padded",
)
"""Arrays of steps with drafts."""


def check(records: list, *names: str) -> None:
    """Core and oracle prepare what was recorded, and a view gets the step as it was.

    `names` are arrays that some of the steps have.
    """
    filled: set[str] = set()
    for record in records:
        assert core_difference(record) is None and oracle_difference(record) is None
        again = prepared_arrays(record.step(), record.settings)
        assert all(np.array_equal(again[name], each) for name, each in record.prepared.items())
        filled |= {name for name, array in record.prepared.items() if array.size}
    assert filled >= set(names)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("gemma3"), "Gemma3", **THREE_GROUPS)


@pytest.mark.parametrize("runner_name", ALSO_V2)
def test_groups_with_windows_in_graphs_are_recorded_as_they_come(
    gemma3, tmp_path, capsys, runner_name
):
    """Chunks, a prefix cache, preemption, graph padding."""
    first, *others = prompts_of(SEED, [70, 5, 30, 12, 14, 40, 1])
    prompts = [first, first[:61], first[:48] + others[0], *others]
    with engine_of(
        runner_name,
        gemma3,
        max_num_batched_tokens=32,
        block_size=4,
        num_gpu_blocks_override=76,
        max_model_len=96,
        additional_config=recording(tmp_path, "3:50"),
        **graphs("FULL_AND_PIECEWISE", 1, 2, 4, 8, 16),
    ) as llm:
        preempted = count_preemptions(llm)
        generate(llm, prompts[:1], greedy(2))
        generate(llm, prompts, greedy(24))
    records = records_in(tmp_path)
    assert [record.number for record in records] == list(range(3, 50))
    assert sum(preempted.values())
    assert {record.settings.mode for record in records} >= {"FULL", "PIECEWISE"}
    windows = [group.sliding_window for group in records[0].settings.groups]
    assert windows == [WINDOW, WINDOW, None]
    of_groups = [
        f"kv_cache_groups.{g}.{n}" for g in range(3) for n in ("slot_mapping", "block_table")
    ]
    check(records, *of_groups)
    (manifest,) = tmp_path.glob("*/manifest.json")
    told = json.loads(manifest.read_text())
    assert told["config"]["max_model_len"] == 96 and "vllm" in told["versions"]
    names = {name for record in records for name in record.settings.req_ids}
    assert all(len(name) == 16 for name in names)  # hashed

    assert main(["replay", str(tmp_path)]) == 0
    assert "47 steps: core and oracle prepare what was recorded" in capsys.readouterr().out


@pytest.mark.parametrize("runner_name", ALSO_V2)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_last_steps_are_written_when_asked(
    tmp_path_factory, tmp_path, asynchronous, runner_name
):
    """Drafts of an EAGLE head; under async scheduling, and on V2, samples are on the device."""
    model = make_model(tmp_path_factory.mktemp("qwen3"), spread=0.1, embedding_scale=20)
    drafter = make_eagle_head(tmp_path_factory.mktemp("eagle"), model, "eagle")
    drafts = {"method": "eagle", "num_speculative_tokens": 3, "model": str(drafter)}
    samples_are_on_device = asynchronous or runner_name == "V2"
    with engine_of(
        runner_name,
        model,
        max_num_seqs=5,
        max_model_len=128,
        block_size=4,
        max_num_batched_tokens=48,
        async_scheduling=asynchronous,
        speculative_config=drafts,
        additional_config=recording(tmp_path, "last 20", request_ids="plain"),
    ) as llm:
        recorder = runner_of(llm).recorder
        generate(llm, prompts_of(SEED, [3, 1, 90, 40, 17, 30]), greedy(24))
        assert not list(tmp_path.iterdir())  # nothing on disk until asked
        (answer,) = llm.collective_rpc("dump_steps")
        count, last = len(records_in(tmp_path)), recorder.steps - 1
        generate(llm, prompts_of(SEED + 1, [20, 7]), greedy(8))
        llm.collective_rpc("dump_steps")
        folder = recorder.folder
    assert answer == f"20 steps are in {folder} (dump_steps)" and count == 20
    records = records_in(tmp_path)
    assert [r.number for r in records] == list(range(last - 19, recorder.steps))
    assert any(record.settings.req_ids[0].startswith("0") for record in records)
    assert any(record.batch.num_draft_tokens.any() for record in records)
    on_device = [r for r in records if "is_on_device" in r.prepared]
    assert bool(on_device) == samples_are_on_device
    if samples_are_on_device:
        assert any(record.prepared["is_on_device"].any() for record in on_device)
        assert any(record.batch.token_ids.min() < 0 for record in on_device)
        check(records, "is_on_device", "sampled_token_targets", *DRAFT_ARRAYS)
    else:
        check(records, *DRAFT_ARRAYS)


@pytest.mark.parametrize("runner_name", ALSO_V2)
def test_a_step_that_breaks_a_rule_is_the_last_of_the_record(qwen3, tmp_path, runner_name):
    prepare_step = v1_runner.prepare_step

    def wrong(*args):
        step = prepare_step(*args)
        if step.num_reqs == 3 and (step.seq_lens > 20).any():
            step.arrays.slot_mapping[0, 1] += 1
            step.rule = Rule.NOT_CHECKED  # the pass that wrote it checked it without the fault
        return step

    options = recording(tmp_path, "last 8", check="full", request_ids="plain")
    sizes = {"block_size": 4, "max_model_len": 64}
    with engine_of(runner_name, qwen3, **sizes, additional_config=options) as llm:
        with (
            mock.patch.object(PREPARED_BY[runner_name], "prepare_step", wrong),
            pytest.raises(StepCheckError, match="token 1, KV-cache group 0: given") as raised,
        ):
            generate(llm, prompts_of(SEED, [7, 12, 3]), greedy(24))
        last = runner_of(llm).recorder.steps - 1
        assert one_line.left() == str(raised.value)  # for the last line of a server
    *before, record = records_in(tmp_path)
    assert record.number == last and len(before) == 7
    check(before)
    for prepare_again in (core_difference, oracle_difference):
        found = prepare_again(record)
        assert (found.variable, found.index) == ("slot_mapping", (1,))
        assert (found.req_id, found.token) == (raised.value.request, raised.value.token)
    assert main(["explain", str(tmp_path), "--step", str(last)]) == 0


@pytest.mark.parametrize("runner_name", ALSO_V2)
def test_images_and_mrope_positions_are_recorded(vision_models, tmp_path, seed, runner_name):
    with engine_of(
        runner_name,
        vision_models / "qwen2_5_vl",
        skip_tokenizer_init=False,
        max_num_batched_tokens=32,
        block_size=16,
        additional_config=recording(tmp_path, "0:1000"),
    ) as llm:
        requests = [chat(make_image(seed), "What is it?"), chat("And?"), chat(make_image(seed + 1))]
        serve(llm, requests, greedy(4))
    records = records_in(tmp_path)
    embeds = {record.settings.takes_embeds for record in records}
    assert embeds == ({True, False} if runner_name == "V1" else {False})
    named = {name for record in records for name in record.settings.modalities}
    assert named == ({"image"} if runner_name == "V1" else set()), "records of V2 mark no images"
    assert any(
        (record.prepared["mrope_positions"][0] != record.prepared["mrope_positions"][2]).any()
        for record in records
    )
    check(records, "mrope_positions", "mrope_positions_padded")
