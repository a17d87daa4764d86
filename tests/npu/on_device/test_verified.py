"""An engine that reads a table of verified calls: what torch's forms give, and its tokens."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch

from ascend_emulator import api, faults
from ascend_emulator.operators import elementwise, int8_fused, rotary_cache
from tests.helpers.engine import engine_config, generate, greedy, make_model
from tests.helpers.fused import forget_layers
from tests.helpers.prompts import prompts_of
from tests.helpers.quantized import QUANTIZE, change_tensors
from tests.helpers.v2 import engine_of
from tests.npu import planted_kernels
from tests.npu.planted_kernels import PLANTED, RIGHT_COLUMNS
from vllm_npu_prep.compat.operators import Overrides
from vllm_npu_prep.compat.releases import installed
from vllm_npu_prep.device import cann_version, make_device
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.quantization import int8 as int8_layers
from vllm_npu_prep.verify import fused, int8
from vllm_npu_prep.verify.calls.call import Call
from vllm_npu_prep.verify.calls.forms import FORMS, form_of
from vllm_npu_prep.verify.calls.table import Table, TableWriter
from vllm_npu_prep.verify.child import run_row
from vllm_npu_prep.verify.outcome import Result, RunResults
from vllm_npu_prep.verify.row import RowContext

WRONG = (elementwise.SWIGLU, elementwise.RMS_NORM, elementwise.ADD_RMS_NORM)
"""Operators that an engine calls and that are planted: wrong in graphs, wrong if wide, slow."""


@pytest.fixture
def overrides() -> Iterator[Overrides]:
    found = Overrides()
    yield found
    found.end()


def always_torch(operator: str, taken: set[str], args, kwargs):
    schema = Call(operator, {}).function()._schema
    form = form_of(Call.of(schema, args, kwargs, False))
    taken |= {operator} if form else set()
    return form


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torchs_forms_give_what_formulas_say(overrides, dtype):
    """By the probes of the operators, which don't notice that another function makes their calls.

    No form calls the operator that it stands for, which would never end.
    """
    taken: set[str] = set()
    for operator in FORMS:
        overrides.add(Call(operator, {}).function(), partial(always_torch, operator, taken))
    probes = {**fused.probes(dtype)}
    for name, (_, probe_of) in {**int8.OF_LINEAR_LAYERS, **int8.OTHERS}.items():
        probes[f"int8 {name}"] = probe_of(dtype)
    outcomes = {name: each.run(name, lambda x: x.to("npu")) for name, each in probes.items()}
    assert {n: each.got for n, each in outcomes.items() if each.verdict.is_bad} == {}
    assert taken == FORMS.keys()


def test_an_operator_gets_its_own_kernel_back(overrides):
    swiglu, x = torch.ops.npu.npu_swiglu, torch.randn(3, 64, dtype=torch.float16).to("npu")
    own, asked = swiglu(x), []

    def choose(args, kwargs):
        asked.append(args)
        return torch.zeros_like if len(args[0]) == 1 else None

    overrides.add(swiglu.default, choose)
    assert torch.equal(swiglu(x).cpu(), own.cpu()) and not swiglu(x[:1]).cpu().any()
    overrides.end()
    assert torch.equal(swiglu(x[:1]).cpu(), own[:1].cpu()) and len(asked) == 2


def test_untried_shapes_of_a_wrong_kernel_take_torchs_form(monkeypatch):
    from vllm_npu_prep.verify.calls.verified import VerifiedCalls  # it needs torch_npu

    swiglu, operator = torch.ops.npu.npu_swiglu, elementwise.SWIGLU
    given = {n: torch.randn(n, 64, dtype=torch.float16).to("npu") for n in (3, 4, 5)}
    results = {}
    for n, verdict in ((3, "DIFFERS"), (4, "same")):
        key = Call.of(swiglu.default._schema, (given[n],), {}, False).key
        results[key] = Result(f"swiglu-{n}", operator, "", "1", "0", verdict, 0.1, torch_got="")
    monkeypatch.setitem(FORMS, operator, lambda input, dim=-1: torch.zeros_like(input[:, :32]))
    verified = VerifiedCalls(Table(Path(), {}, {}, {}, results))
    verified.override()
    by_form = {n: not swiglu(x).cpu().any() for n, x in given.items()}
    verified.end()
    assert by_form == {3: True, 4: False, 5: True}


def test_what_is_in_no_list_is_not_counted():
    """Views, and operators that only make room; a known call and an unknown one are."""
    from vllm_npu_prep.verify.calls.verified import VerifiedCalls

    swiglu, x = torch.ops.npu.npu_swiglu, torch.ones(5, 64, dtype=torch.float16).to("npu")
    key = Call.of(swiglu.default._schema, (x,), {}, False).key
    right = Result("swiglu-1", elementwise.SWIGLU, "", "1", "1", "same", 0.1)
    verified = VerifiedCalls(Table(Path("table.jsonl"), {}, {}, {}, {key: right}))
    with verified.counting():
        for _ in range(2):
            swiglu(x)
        swiglu(x.view(10, 32).new_empty(3, 64))
    assert verified.describe().startswith("Verified: 1 of 2 distinct calls of this start-up are")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose rows are wider than a planted kernel takes."""
    sizes = {"hidden_size": RIGHT_COLUMNS + 32, "head_dim": 64, "num_hidden_layers": 1}
    return make_model(tmp_path_factory.mktemp("wide") / "model", spread=0.02, **sizes)


def tokens_of(model, **options) -> list[list[int]]:
    """Greedy tokens of an engine whose decodes are captured."""
    settings = {
        "dtype": "float16",
        "block_size": 128,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "enforce_eager": False,
        "compilation_config": {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [2],
        },
        "additional_config": {"npu_prep": {"probe": False, **options}},
    }
    forget_layers()
    with engine_of("V2", model, **settings) as llm:
        return generate(llm, prompts_of(5, [5, 33]), greedy(5))


def tokens_and_calls(model) -> tuple[list[list[int]], list[Call]]:
    """Tokens of an engine on a device that makes no mistake, and the calls that it made."""
    from vllm_npu_prep.verify.calls.verified import VerifiedCalls  # it needs torch_npu

    counting = VerifiedCalls(Table(Path(), {}, {}, {}, {}))
    with counting.counting():
        tokens = tokens_of(model)
    return tokens, [*counting.counted.values()]


@pytest.fixture(scope="module")
def right(model) -> tuple[list[list[int]], list[Call]]:
    return tokens_and_calls(model)


def tried(calls: list[Call], folder: Path) -> list[tuple[str, Result]]:
    """What the rows of calls find, by the calls' keys."""
    from vllm_npu_prep.verify.calls.call_rows import rows_of

    results, context = [], RowContext(make_device("npu"), folder)
    for row in rows_of(calls):
        form = asdict(row.first(context))
        outcome, _ = run_row(row, context)
        results.append((row.key, Result(row.name, row.what, **outcome, seconds=1, **form)))
    return results


@pytest.fixture
def planted() -> Iterator[None]:
    for operator in WRONG:
        api.register_reference(operator, PLANTED[operator])
    yield
    for operator in WRONG:
        api.register_reference(operator, getattr(elementwise, operator.partition("npu_")[2]))
    api.register_reference(rotary_cache.MROPE, rotary_cache.mrope)


def write_table(path: Path, model: Path, results: list[tuple[str, Result]]) -> None:
    config = json.loads((model / "config.json").read_text())
    keys = {result.name: key for key, result in results}
    engine = {"model": "model", "config": config}
    software = {"CANN": cann_version("npu")}
    found = RunResults(make_device("npu").name, software, [], engine, keys)
    writer = TableWriter(path, found, {"torch_npu": installed("torch_npu")}, None)
    for _, result in results:
        writer.add(result)


def test_an_engine_serves_right_tokens_by_its_table(model, right, planted, tmp_path, monkeypatch):
    """Beside kernels that are wrong in graphs, wrong for wide rows, slow, or end the process."""
    tokens, made = right
    calls = [call for call in made if call.operator in WRONG]
    results = tried(calls, tmp_path)
    for (_, result), call in zip(results, calls):
        sizes = [each["shape"][-1] for each in call.arguments.values() if isinstance(each, dict)]
        wanted = {
            elementwise.RMS_NORM: "DIFFERS" if max(sizes) > RIGHT_COLUMNS else result.verdict,
            elementwise.SWIGLU: "DIFFERS" if call.captured else result.verdict,
            elementwise.ADD_RMS_NORM: "slower",
        }
        assert result.verdict == wanted[call.operator], result
        assert result.torch_got == ""
    assert any(result.verdict == "same" for _, result in results)
    assert tokens_of(model) != tokens
    monkeypatch.setattr(planted_kernels, "HEADS", 4)
    api.register_reference(rotary_cache.MROPE, PLANTED[rotary_cache.MROPE])  # ends the process
    rotated = [call for call in made if call.operator == rotary_cache.MROPE]
    what = {"given": "", "expected": "an answer", "got": "SIGFPE", "verdict": "DEAD", "seconds": 1}
    results += [
        (each.key, Result(f"mrope-{n}", each.operator, **what, torch_got=""))
        for n, each in enumerate(rotated)
    ]
    write_table(tmp_path / "table.jsonl", model, results)
    assert tokens_of(model, verified=str(tmp_path / "table.jsonl")) == tokens


def widen_last_part(tensors: dict[str, torch.Tensor]) -> None:
    """Let a row's largest numbers come after those that the kernel takes first."""
    for name in tensors:
        if name.endswith("up_proj.weight"):
            tensors[name][int8_fused.PART :] *= 30


def test_an_engine_serves_right_tokens_beside_a_stale_scale(tmp_path, monkeypatch):
    """Layers don't take the operator for rows above 7,840 columns; here they would."""
    monkeypatch.setattr(int8_layers, "MOST_COLUMNS_OF_SWIGLU", 1 << 20)
    make_model(tmp_path / "float", intermediate_size=int8_fused.PART + 512)
    change_tensors(tmp_path / "float", widen_last_part)
    QUANTIZE(tmp_path / "float", tmp_path / "int8", "compressed-tensors")
    tokens, made = tokens_and_calls(tmp_path / "int8")
    wide = [call for call in made if call.operator == int8_fused.DEQUANT_SWIGLU_QUANT]
    with monkeypatch.context() as patch:
        patch.setenv(faults.FAULTS_VARIABLE, "early-maximum")
        faults._of_process.cache_clear()
        assert tokens_of(tmp_path / "int8") != tokens
        results = tried(wide, tmp_path)
        assert {result.verdict for _, result in results} == {"DIFFERS"}
        write_table(tmp_path / "table.jsonl", tmp_path / "int8", results)
        served = tokens_of(tmp_path / "int8", verified=str(tmp_path / "table.jsonl"))
    faults._of_process.cache_clear()
    assert served == tokens


def test_a_wrong_call_without_another_form_is_refused(model, tmp_path):
    call = Call("npu::npu_scatter_pa_kv_cache", {"cache_mode": "Norm"})
    bad = Result("write-1", call.operator, str(call), "1 at row 3", "0", "DIFFERS", 0.1)
    write_table(tmp_path / "table.jsonl", model, [(call.key, bad)])
    options = {"npu_prep": {"verified": str(tmp_path / "table.jsonl")}}
    with pytest.raises(
        PrepError, match=r"npu_scatter_pa_kv_cache .*expected 1 at row 3, got 0; tor"
    ):
        engine_config(model, dtype="float16", additional_config=options)
