"""The matrix: cells come from engines that ran, refusals from start-up, the page from both."""

import random
from types import SimpleNamespace

import pytest

from tests.helpers.engine import engine_config
from tests.matrix import collect, page, results
from tests.matrix.__main__ import ROWS
from tests.matrix.asked import answer, engine_for
from tests.matrix.cells import EMULATED, FALLBACK, FEATURES, W8A8
from tests.matrix.plan import no_use
from tests.matrix.results import Matrix
from vllm_npu_prep.compat.releases import SUPPORTED_VLLM, installed_vllm
from vllm_npu_prep.startup.refusals import REFUSALS

MATRIX = Matrix.read()
NAMES = {feature.name for feature in FEATURES}
QWEN3 = "Qwen3ForCausalLM"


def engine_line(test: str, *features: str, **more) -> dict:
    line = {"test": test, "release": "0.32.0", "device": FALLBACK, "runner": "V1", "model": "M"}
    line |= {"features": list(features), "outcome": "passed", "commit": "c" * 10}
    return line | {"package": "p" * 10} | more


def test_the_page_says_what_the_results_say():
    assert page.PAGE.read_text() == page.render(MATRIX), "make matrix MERGE=1"


def test_a_cell_names_a_test_that_exists(request):
    """Those of files that this run collects; which rows are collected depends on the device."""
    collected = {item.nodeid for item in request.config.stash[collect.COLLECTED]}
    files = {nodeid.partition("::")[0] for nodeid in collected} - {ROWS}
    named = {line["test"] for line in MATRIX.engines}
    assert {test for test in named if test.partition("::")[0] in files} <= collected


def test_a_cell_is_of_a_feature_and_a_table_that_there_are():
    assert len(MATRIX.filled()) > 200
    for line in MATRIX.engines:
        assert set(line["features"]) <= NAMES and line["release"] in SUPPORTED_VLLM
        assert line["device"] in (FALLBACK, EMULATED) and line["runner"] in ("V1", "V2")
        assert len(line["commit"]) == len(line["package"]) == 10
    for table, models in MATRIX.tables().items():
        for model in models if table[0] == installed_vllm() else ():
            useful = {name for name in NAMES if not no_use(model, name)}
            assert set(MATRIX.answers[table, model]) == useful
    told = [each for of_model in MATRIX.answers.values() for each in of_model.values()]
    assert {name for each in told for name in each.get("refused", ())} <= set(REFUSALS)


def test_start_up_still_says_what_the_page_says(seed):
    """Each refusal of the page is asked for again, and some of what is accepted."""
    asked, accepted = {}, []
    for (table, model), told in MATRIX.answers.items():
        for feature, each in told.items() if table[0] == installed_vllm() else ():
            cell = (model, feature, *table[1:]), each
            for name in each.get("refused", ()):
                asked.setdefault(name, cell)
            accepted += [] if each else [cell]
    assert len(asked) > 10
    for cell, told in [*asked.values(), *random.Random(seed).sample(accepted, 20)]:
        assert answer(*cell) == told, cell


def test_every_feature_is_one_that_can_be_asked_for():
    """Its settings make an engine that has it, or are refused; none is without effect."""
    told = {each: answer(QWEN3, each, FALLBACK, "V1") for each in NAMES}
    wrong = {name for name, each in told.items() if "error" in each}
    assert wrong == {"MTP", "expert parallelism"}  # a dense model without MTP layers
    for feature in FEATURES:
        if feature.name not in wrong and (feature.asked or feature.name == W8A8):
            folder, settings = engine_for(QWEN3, FALLBACK, {feature.name})
            assert feature.has(engine_config(folder, **settings)), feature.name


def test_newer_lines_replace_older_ones_and_few_are_kept():
    matrix, tests = Matrix(), {"a", "b", "c", "d"}
    old = [
        engine_line("a", "LoRA", "float32", package="o" * 10, config={"of": "old lines"}),
        engine_line("b", "MTP", package="o" * 10),
        engine_line("gone", "sleep mode"),
    ]
    matrix.merge(old, "p" * 10, tests)
    assert [line["test"] for line in matrix.engines] == ["a", "b"]
    assert "config" not in matrix.engines[0]
    assert matrix.stale("p" * 10) == {"a", "b"}
    new = [
        engine_line("c", "LoRA", "float32", "sleep mode"),
        engine_line("d", "LoRA"),
        engine_line("b", "MTP", outcome="failed"),
    ]
    matrix.merge(new, "p" * 10, tests)
    assert {each["test"]: each["outcome"] for each in matrix.engines} == {
        "c": "passed",
        "b": "failed",
    }
    assert matrix.stale("p" * 10) == {"b"}, "it failed"
    outcomes = {feature: outcome for (_, _, feature), outcome in matrix.filled().items()}
    served = dict.fromkeys(("LoRA", "float32", "sleep mode"), "passed")
    assert outcomes == {**served, "MTP": "failed"}
    matrix.merge([engine_line("b", "ngram")], "p" * 10, tests)
    assert [each["outcome"] for each in matrix.engines] == ["passed", "passed"]


@pytest.mark.parametrize("known", [(), ("c" * 10, "p" * 10)], ids=["no commit", "commit"])
def test_engines_are_written_with_their_test_and_its_outcome(tmp_path, monkeypatch, known):
    """Those of tests that were not skipped, once the last phase ended, beside a commit only."""
    file, kept = tmp_path / "out" / "cells.jsonl", collect.taken()
    monkeypatch.setattr(collect, "commit", lambda: known or ("", ""))
    collector = collect.Collector(file)
    for outcome in ("passed", "failed", "skipped"):
        collect.add([{"model": "M"}] * 2)
        for when in ("setup", "call", "teardown"):
            of_phase = outcome if when == "call" else "passed"
            report = SimpleNamespace(nodeid=f"test_{outcome}", outcome=of_phase, when=when)
            collector.pytest_runtest_logreport(report)
    collector.pytest_runtest_logreport(
        SimpleNamespace(nodeid="test_without", outcome="passed", when="teardown")
    )
    collect.add(kept)
    line = {"model": "M", "commit": "c" * 10, "package": "p" * 10}
    ended = [{**line, "test": f"test_{each}", "outcome": each} for each in ("passed", "failed")]
    assert results.lines_of(file) == (ended if known else [])
