"""`verify-device --model`: the calls of an engine, recorded without computing, and tried."""

from collections import Counter

import pytest
import torch

from ascend_emulator import api, faults
from ascend_emulator.operators import REFERENCES, elementwise
from tests.helpers import models
from tests.helpers.engine import make_model
from tests.helpers.quantized import QUANTIZE
from tests.npu.models import INDEXED, WIDE_EXPERTS
from vllm_npu_prep.device import make_device
from vllm_npu_prep.verify.calls.call import Call, read_list
from vllm_npu_prep.verify.calls.expected_attention import OLDER_NAMES
from vllm_npu_prep.verify.child import run_row
from vllm_npu_prep.verify.children import record_calls
from vllm_npu_prep.verify.row import RowContext

CONFIG = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 16 << 20,
}
DATA_PARALLEL = {
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "additional_config": {"npu_prep": {"probe": False, "mc2": "on"}},
}


@pytest.fixture(scope="module")
def calls(tmp_path_factory, demo_model):
    """The calls of a tiny engine, of which only config.json is there."""
    folder = tmp_path_factory.mktemp("engine")
    (folder / "config.json").write_bytes((demo_model / "config.json").read_bytes())
    record_calls({"model": str(folder), **CONFIG}, folder / "calls.jsonl.gz", folder)
    return read_list(folder / "calls.jsonl.gz")[1]


@pytest.fixture(scope="module")
def rows(calls):
    from vllm_npu_prep.verify.calls.call_rows import rows_of  # it needs torch_npu

    return rows_of(calls)


@pytest.fixture(scope="module")
def run(rows, tmp_path_factory):
    """Function of the beginnings of rows' names: their outcomes, by name."""
    context = RowContext(make_device("npu"), tmp_path_factory.mktemp("rows"))

    def run(*names: str) -> dict[str, dict]:
        return {row.name: run_row(row, context)[0] for row in rows if row.name.startswith(names)}

    return run


def test_floats_are_not_computed_while_calls_are_recorded():
    from vllm_npu_prep.verify.calls.call_recorder import CallRecorder

    x, places = torch.zeros(3, device="npu"), torch.arange(3, device="npu")
    with CallRecorder() as recorder:
        x.add_(1)
        places.add_(1)
    assert x.tolist() == [0, 0, 0]
    assert places.tolist() == [1, 2, 3]
    assert [call.name for call in recorder.calls] == ["add_.Tensor"] * 2


def test_a_cache_is_not_written_while_calls_are_recorded():
    """Caches of 64 layers would not fit a host's memory; tables of whole numbers begin with 0."""
    from vllm_npu_prep.verify.calls.call_recorder import SMALL, CallRecorder

    with CallRecorder(), api.count() as counts:
        torch.zeros(SMALL + 1, dtype=torch.int8, device="npu")
    assert counts.launches == 0
    with CallRecorder(), api.count() as counts:
        table = torch.zeros(SMALL + 1, dtype=torch.int32, device="npu")
    assert counts.launches == 1 and not table.any()


@pytest.mark.parametrize("wrong_in", ["a graph", "its second run"])
def test_a_kernel_that_is_wrong_later_is_found(tmp_path, wrong_in):
    """Its first result is right, and so is a call that no graph captures."""
    from vllm_npu_prep.verify.calls.call_rows import rows_of

    runs = [0]

    def swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
        runs[0] += 1
        in_graph = api._launcher().emulator_in_launch() == api.OF_A_GRAPH
        first, second = input.float().chunk(2, dim)
        result = (torch.nn.functional.silu(first) * second).to(input.dtype)
        return result + (in_graph if wrong_in == "a graph" else runs[0] == 2)

    given = {"input": {"dtype": "float16", "shape": [3, 64]}}
    (row,) = rows_of([Call(elementwise.SWIGLU, given, captured=True)])
    api.register_reference(elementwise.SWIGLU, swiglu)
    outcome, _ = run_row(row, RowContext(make_device("npu"), tmp_path))
    api.register_reference(elementwise.SWIGLU, elementwise.swiglu)
    how = "captured and replayed" if wrong_in == "a graph" else "made again"
    assert (outcome["verdict"], outcome["got"].partition(":")[0]) == ("DIFFERS", how)


def found_before_and_with(wrong, own, call: Call, folder) -> tuple[str, str, str]:
    """The verdict on a call, then that on one with another reference, and what was seen by it."""
    from vllm_npu_prep.verify.calls.call_rows import rows_of

    (row,), context = rows_of([call]), RowContext(make_device("npu"), folder)
    before, _ = run_row(row, context)
    api.register_reference(**own._replace(function=wrong)._asdict())
    outcome, _ = run_row(row, context)
    api.register_reference(**own._asdict())
    return before["verdict"], outcome["verdict"], outcome["got"].partition(":")[0]


@pytest.mark.parametrize("version", ["", "_v2"])
def test_captured_attention_that_loses_keys_is_found(tmp_path, version):
    """It was captured with one key for each request, as engines do, and with the null block."""
    operator = f"npu::npu_fused_infer_attention_score{version}"
    (own,) = (each for each in REFERENCES if (each.name, each.overload) == (operator, "out"))
    names = OLDER_NAMES if version else {name: name for name in OLDER_NAMES.values()}
    ends, lengths, heads, scale, _ = names

    def wrong(*args, **given):
        if api._launcher().emulator_in_launch() == api.OF_A_GRAPH:
            given[lengths] = [min(each, 1024) for each in given[lengths]]
        return own.function(*args, **given)

    plane, query = ({"dtype": "float16", "shape": shape} for shape in ([20, 128, 64], [2, 1, 64]))
    table = {"dtype": "int32", "shape": [2, 16], "values": [0] * 32}
    empty = {"dtype": "float32", "shape": [0]}
    given = {
        "query": query,
        "key": plane,
        "value": plane,
        "block_table": table,
        **{ends: [1, 2], lengths: [1, 1], heads: 1, scale: 0.125, "block_size": 128},
        "num_key_value_heads": 1,
        "input_layout": "TND",
        "workspace": {"dtype": "float16", "shape": [4096]},
        "out": [query, empty],
    }
    call = Call(f"{operator}.out", given, captured=True)
    found = found_before_and_with(wrong, own, call, tmp_path)
    assert found == ("same", "DIFFERS", "replayed with other numbers")


def test_captured_experts_that_keep_their_rows_are_found(tmp_path):
    """The sizes of their groups are a tensor: a kernel kept those that it was captured with."""
    operator, kept = "npu::npu_grouped_matmul", []
    (own,) = (each for each in REFERENCES if (each.name, each.overload) == (operator, ""))

    def wrong(*args, **given):
        if api._launcher().emulator_in_launch() == api.OF_A_GRAPH:
            kept.append(given["group_list"].clone())
            given["group_list"] = kept[0]
        return own.function(*args, **given)

    x, weight = ({"dtype": "bfloat16", "shape": shape} for shape in ([64, 32], [4, 32, 48]))
    given = {
        "x": [x],
        "weight": [weight],
        "group_list": {"dtype": "int64", "shape": [4], "values": [0] * 4},
        **{"split_item": 2, "group_type": 0, "group_list_type": 1},
    }
    found = found_before_and_with(wrong, own, Call(operator, given, captured=True), tmp_path)
    assert found == ("same", "DIFFERS", "replayed with its own numbers")


@pytest.mark.parametrize("judged", [True, False])
def test_a_call_that_takes_longer_than_kernels_do_is_not_slower(tmp_path, monkeypatch, judged):
    """Its kernel was compiled first: that it is switched off would be a mistake."""
    from vllm_npu_prep.verify.calls import call_rows

    monkeypatch.setattr(call_rows, "SLOWER", 0)  # any call is
    monkeypatch.setattr(call_rows, "LONG", call_rows.LONG if judged else 0)
    given = {"input": {"dtype": "float16", "shape": [3, 64]}}
    tried = call_rows.TriedCall(Call(elementwise.SWIGLU, given))
    context = RowContext(make_device("npu"), tmp_path)
    assert tried.form(context).torch_got == ""
    assert tried.run(context).verdict == ("slower" if judged else "same")


def test_a_call_that_memory_does_not_hold_is_left_out(tmp_path):
    """A failure in the table would switch its operator off."""
    import torch_npu

    from vllm_npu_prep.verify.calls.call_rows import rows_of

    given = {"input": {"dtype": "float16", "shape": [1 << 12, 1 << 12]}}
    (row,) = rows_of([Call(elementwise.SWIGLU, given)])
    context = RowContext(make_device("npu"), tmp_path)
    torch_npu.npu.empty_cache()
    torch_npu.npu.set_per_process_memory_fraction(1e-6)
    outcome, goes_on = run_row(row, context)
    torch_npu.npu.set_per_process_memory_fraction(1.0)
    assert (outcome["verdict"], goes_on) == ("left out", True)
    assert "memory does not hold the call" in outcome["got"]
    assert run_row(row, context)[0]["verdict"] == "same"


def test_each_call_has_a_row_with_a_name_of_its_own():
    """Else the table would lack one of two calls, and the report would show one result twice."""
    from vllm_npu_prep.verify.calls.call_rows import rows_of

    calls = [Call(f"aten::{name}", {}) for name in ("silu", "silu_", "_to_copy", "to_copy")]
    assert len({row.name for row in rows_of(calls)}) == len(calls)


def test_a_captured_call_is_noted_with_the_numbers_of_its_step():
    """They are read when the capture has ended, before another step changes them."""
    from vllm_npu_prep.verify.calls.call_recorder import CallRecorder

    key, planes = torch.ones(2, 1, 16, device="npu"), torch.zeros(2, 4, 128, 1, 16, device="npu")
    key, (keys, values) = key.half(), planes.half()
    slots = torch.tensor([300, -1], dtype=torch.int32).to("npu")
    graph = torch.npu.NPUGraph()
    with CallRecorder() as recorder:
        with torch.npu.graph(graph):
            torch.ops.npu.npu_scatter_pa_kv_cache(key, key, keys, values, slots, cache_mode="Norm")
        slots.add_(1)
    (write,) = [call for call in recorder.calls if call.name == "npu_scatter_pa_kv_cache"]
    assert write.captured and write.arguments["slot_mapping"]["values"] == [300, -1]


def rows_routed(calls: list[Call]) -> set[int]:
    """Numbers of tokens that routing sorts by expert."""
    of_routing = [call for call in calls if call.name == "npu_moe_init_routing_v2"]
    return {call.arguments["x"]["shape"][0] for call in of_routing}


@pytest.mark.parametrize(
    "kind",
    [
        *("int8 experts, latent attention, ranks", "gated delta nets", "int4, zero points"),
        *("experts", "data-parallel ranks", "W4A8", "sparse attention"),
    ],
)
def test_other_models_give_what_their_formulas_say(kind, tmp_path):
    """The first call of each operator, captured and not; those that size a workspace have none."""
    from vllm_npu_prep.verify.calls.call_rows import rows_of

    if kind == "gated delta nets":
        model, others = models.folder_of("Qwen3NextForCausalLM"), {}
    elif kind == "sparse attention":
        model, others = make_model(tmp_path / "model", "DeepseekV32", **INDEXED), {}
    elif kind == "W4A8":
        wide = make_model(tmp_path / "float", "Qwen3Moe", **WIDE_EXPERTS)
        model, others = tmp_path / "int4", {}
        QUANTIZE(wide, model, "compressed-tensors", scheme="W4A8", group=256)
    elif kind == "data-parallel ranks":
        model, others = models.folder_of("Qwen3MoeForCausalLM"), DATA_PARALLEL
    elif kind in ("int4, zero points", "experts"):
        name, form = "Qwen3ForCausalLM", "awq"
        if kind == "experts":
            name, form = "Qwen3MoeForCausalLM", "compressed-tensors"
        model, others = models.int8_of(name, form, scheme="W4A16_ASYM", group=32), {}
    else:
        model = models.int8_of("DeepseekV3ForCausalLM")
        others = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    settings = {"model": str(tmp_path), "dtype": "bfloat16", **CONFIG, **others}
    record_calls(settings, tmp_path / "calls.jsonl", tmp_path)
    recorded = read_list(tmp_path / "calls.jsonl")[1]
    if kind == "data-parallel ranks":  # which exchange small steps and gather others
        assert {2 * tokens for tokens in (129, 256)} <= rows_routed(recorded)
        assert not [call for call in recorded if "moe_distribute" in call.operator]
    recorded = reversed(recorded)
    calls = list({(call.operator, call.captured): call for call in recorded}.values())
    context = RowContext(make_device("npu"), tmp_path)
    outcomes = {row.name: run_row(row, context)[0] for row in rows_of(calls)}
    bad = {name: each for name, each in outcomes.items() if each["verdict"] not in ("same", "ran")}
    assert not bad
    unknown = {name for name, each in outcomes.items() if each["verdict"] == "ran"}
    assert {name for name in unknown if "workspace" not in name} == set()


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
        ("first-table-row", "npu_fused_infer_attention_score"),
        ("padding-slot-written", "npu_scatter_pa_kv_cache"),
    ],
)
def test_a_wrong_kernel_is_found_by_its_rows(run, monkeypatch, fault, operator):
    monkeypatch.setenv(faults.FAULTS_VARIABLE, fault)
    faults._of_process.cache_clear()
    outcomes = run(operator)
    faults._of_process.cache_clear()
    verdicts = Counter(each["verdict"] for each in outcomes.values())
    print(fault, dict(verdicts))
    assert verdicts["DIFFERS"] > 0
