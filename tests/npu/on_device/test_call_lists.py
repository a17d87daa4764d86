"""`verify-device --model`: the calls of an engine, recorded without computing, and tried."""

from collections import Counter

import pytest

from ascend_emulator import faults
from vllm_npu_prep.device import make_device
from vllm_npu_prep.verify.calls import read_list
from vllm_npu_prep.verify.child import run_row
from vllm_npu_prep.verify.children import record_calls
from vllm_npu_prep.verify.row import RowContext

CONFIG = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 16 << 20,
}


@pytest.fixture(scope="module")
def calls(tmp_path_factory, demo_model):
    """The calls of a tiny engine, of which only config.json is there."""
    folder = tmp_path_factory.mktemp("engine")
    (folder / "config.json").write_bytes((demo_model / "config.json").read_bytes())
    record_calls({"model": str(folder), **CONFIG}, folder / "calls.jsonl.gz", folder)
    return read_list(folder / "calls.jsonl.gz")[1]


@pytest.fixture(scope="module")
def run(calls, tmp_path_factory):
    from vllm_npu_prep.verify.call_rows import rows_of  # it needs torch_npu

    context = RowContext(make_device("npu"), tmp_path_factory.mktemp("rows"))

    def run(*operators: str) -> dict[str, dict]:
        rows = [row for row in rows_of(calls) if row.name.startswith(operators)]
        return {row.name: run_row(row, context)[0] for row in rows}

    return run


def test_decodes_prompts_and_captures_are_recorded(calls):
    attention = [call for call in calls if call.name == "npu_fused_infer_attention_score.out"]
    tokens = {(call.arguments["query"]["shape"][0], call.captured) for call in attention}
    assert {(1, True), (8, True), (1, False), (7, False), (129, False)} <= tokens


def test_every_call_gives_what_its_formula_says(run):
    outcomes = run("")
    bad = {name: each for name, each in outcomes.items() if each["verdict"] not in ("same", "ran")}
    assert not bad
    assert Counter(each["verdict"] for each in outcomes.values())["ran"] < len(outcomes) / 10


@pytest.mark.parametrize(
    ("fault", "operator"),
    [
        ("interleaved-heads", "npu_fused_infer_attention_score"),
        ("last-token-dropped", "npu_fused_infer_attention_score"),
        ("padding-slot-written", "npu_scatter_pa_kv_cache"),
    ],
)
def test_a_wrong_kernel_is_found_by_its_rows(run, monkeypatch, fault, operator):
    monkeypatch.setenv(faults.FAULTS_VARIABLE, fault)
    faults._of_process.cache_clear()
    outcomes = run(operator)
    faults._of_process.cache_clear()
    assert "DIFFERS" in {each["verdict"] for each in outcomes.values()}
