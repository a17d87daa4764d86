"""Committed lists of calls: each form of an operator in them, beside the emulator's reference.

The smallest call of a form, made on the host, has to be taken by the reference, which refuses what
a kernel would, and the formula has to agree. `make test-all` also records each list again.
"""

import json
from collections import defaultdict
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from ascend_emulator.operators import REFERENCES
from tests.helpers.emulator import emulate, why_no_emulator
from tests.verify.forms import UNMET, elements, form_of, is_tensor, listed
from vllm_npu_prep.cli import main
from vllm_npu_prep.compat.releases import SUPPORTED_VLLM, installed_vllm
from vllm_npu_prep.verify import children
from vllm_npu_prep.verify.calls import lists
from vllm_npu_prep.verify.calls.call import (
    Call,
    in_runs,
    made_arguments,
    moved_arguments,
    out_of_runs,
    read_list,
)
from vllm_npu_prep.verify.calls.expected import expected_of
from vllm_npu_prep.verify.outcome import Verdict
from vllm_npu_prep.verify.row import compare

FUNCTIONS = {(each.name, each.overload): each.function for each in REFERENCES}
WRITTEN = {
    "npu_scatter_pa_kv_cache": ("key_cache", "value_cache"),
    "npu_gather_pa_kv_cache": ("key", "value"),
    "npu_recurrent_gated_delta_rule": ("state",),
}
"""What operators write besides what they return."""

MOST_ROWS = 256
"""Attention over fresh keys is cut to so many tokens."""

SMALL_LISTS = 650_000
"""All lists together have fewer bytes."""


@cache
def forms() -> dict[str, list[Call]]:
    """The smallest call of each form, by operator; operators that size a workspace are left out."""
    found = defaultdict(list)
    for of_lists in listed().values():
        call = min(of_lists.values(), key=elements)
        if "workspace" not in call.operator:
            found[call.name.partition(".")[0]].append(call)
    return found


def cut(call: Call) -> Call:
    """The same call over fewer tokens, if it is attention of one request over fresh keys."""
    if "block_table" in call.arguments or "fused_infer" not in call.operator:
        return call

    def less(value: Any) -> Any:
        if is_tensor(value):
            first, *others = value["shape"]
            return {**value, "shape": [min(first, MOST_ROWS), *others]}
        return min(value, MOST_ROWS) if isinstance(value, int) and value > MOST_ROWS else value

    arguments = {
        name: value if name == "atten_mask" else tree_map(less, value, is_leaf=is_tensor)
        for name, value in call.arguments.items()
    }
    return Call(call.operator, arguments)


def results(call: Call, **others: torch.Tensor) -> list[torch.Tensor]:
    """What the reference of the emulator gives, or what it writes; with other arguments, too."""
    name, _, overload = call.operator.partition(".")
    arguments = moved_arguments(call, made_arguments(call, seed=1), torch.clone) | others
    given = [FUNCTIONS[name, overload](**arguments)]
    given += [arguments[name] for name in WRITTEN.get(call.name, ())]
    return [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]


@pytest.mark.parametrize("operator", sorted(forms()))
def test_a_reference_takes_each_listed_form(operator):
    """And its formula agrees, and doesn't agree with any result that was changed."""
    for whole in forms()[operator]:
        call, form = cut(whole), form_of(whole)
        got = results(call)
        host = made_arguments(call, seed=1)
        parts = expected_of(call.operator, None, host)
        assert parts, form
        for part in parts:
            for change, verdict in ((0, Verdict.SAME), (4, Verdict.DIFFERS)):
                given = got[part.result] if not change else changed(got[part.result])
                outcome = compare(part.of(given), part.values, form, tolerance=part.tolerance)
                assert outcome.verdict is verdict, (form, part.result, outcome)


def test_attention_takes_the_workspace_that_was_sized_for_it():
    """Each list sizes one by the arguments of a captured call; the smallest is tried."""
    pairs = {}
    for name in lists.names():
        calls = read_list(lists.path_of(name))[1]
        captured = {json.dumps(given_before(call)): call for call in calls if call.captured}
        for sizing in (call for call in calls if "workspace" in call.operator):
            attention = captured[json.dumps(given_before(sizing, out=True))]
            known = pairs.setdefault(form_of(sizing), (sizing, attention))
            pairs[form_of(sizing)] = min(known, (sizing, attention), key=lambda x: elements(x[0]))
    assert pairs.keys() == {form for form in listed() if "workspace" in json.loads(form)[0]}
    for sizing, attention in pairs.values():
        (workspace,) = results(sizing)
        assert 0 < len(workspace) <= attention.arguments["workspace"]["shape"][0]
        results(attention, workspace=workspace)


def given_before(call: Call, out: bool = False) -> list[Any]:
    """The operator whose workspace is sized, and what a call of it has before it has one."""
    operator = call.operator.replace("::_", "::").replace("_get_max_workspace", ".out" * out)
    later = "workspace", "out"
    return [operator, {name: x for name, x in call.arguments.items() if name not in later}]


def test_what_no_other_test_meets_is_listed():
    """The forms of a file that was written from a run of the suite; above, all forms are tried."""
    counts, *unmet = map(json.loads, UNMET.read_text().splitlines())
    assert {json.dumps(each["form"]) for each in unmet} <= listed().keys()
    assert len(unmet) == counts["listed"] - counts["met"]


def changed(result: torch.Tensor) -> torch.Tensor:
    """Numbers that are off by 4; places are those of the other end."""
    return (result.double() + 4).to(result.dtype)


def test_each_list_is_of_the_engine_that_is_written_down():
    engines = lists.engines()
    assert lists.names() == sorted(engines)
    for name, engine in engines.items():
        made = read_list(lists.path_of(name))[0]
        assert made == {**engine["settings"], "config": engine["config"], "model": name}


@pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())
@pytest.mark.skipif(installed_vllm() != SUPPORTED_VLLM[0], reason="of the pinned vLLM's engines")
@pytest.mark.parametrize("name", lists.names())
def test_an_engine_of_today_makes_the_calls_of_a_list(name, tmp_path):
    """It is recorded again: a stale list would try calls that no engine makes, and miss others."""
    command = ("-m", "vllm_npu_prep.verify.calls.lists", name, "--out", str(tmp_path))
    done = emulate(*command, options=("--memory", "128G"))
    assert not done.returncode, done.stderr[-4000:]
    paths = lists.path_of(name), tmp_path / lists.path_of(name).name
    listed, made = ({json.dumps(call.as_json()) for call in read_list(path)[1]} for path in paths)
    assert listed == made, f"record {name} again"


def test_lists_are_small():
    assert sum(lists.path_of(name).stat().st_size for name in lists.names()) < SMALL_LISTS


@pytest.mark.parametrize(
    "values", [[], [5], [0] * 9, [7, 8, 9, 10, 0, 0, 0, 0, 0, 3], [1, 3, 5, 7], [-1, 0, 1, 1, 1]]
)
def test_whole_numbers_are_read_back_from_runs(values):
    assert out_of_runs(json.loads(json.dumps(in_runs(values)))) == values


def refusal(capsys: Any, *options: str) -> str:
    assert main(["verify-device", *options]) == 2
    return capsys.readouterr().err.strip()


def test_a_folder_is_recorded_by_its_configuration(monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(children, "record_calls", lambda settings, *_: told.append(settings))
    config = tmp_path / "config.json"
    config.touch()
    record = "--record", str(tmp_path / "calls.jsonl")
    for model in (tmp_path, config):
        assert main(["verify-device", "--model", str(model), "--tp", "2", *record]) == 0
    assert told == [{"model": str(tmp_path), "tensor_parallel_size": 2}] * 2


def test_an_unknown_model_names_those_that_have_a_list(capsys):
    told = refusal(capsys, "--model", "Qwen3-0.7B")
    assert (
        "--model Qwen3-0.7B: neither a folder" in told
        and "Llama-3.1-8B, Qwen3-0.6B, Qwen3-0.6B-TP4" in told
    )


@pytest.mark.parametrize("options", [("--tp", "2"), ("--record", "calls.jsonl")])
def test_a_list_that_is_there_takes_no_settings(capsys, options):
    told = refusal(capsys, "--model", "Qwen3-0.6B", *options)
    assert "a list that is recorded already" in told
