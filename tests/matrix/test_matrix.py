"""The matrix: cells come from engines that ran, refusals from start-up, the page from both."""

import json
import os
import random
import subprocess
import sys

import pytest

from tests.helpers.engine import engine_config, graphs, make_model
from tests.helpers.waiting import LIMIT
from tests.matrix import collect, page, results
from tests.matrix.__main__ import ROWS
from tests.matrix.asked import answer
from tests.matrix.cells import DRAFTER, EMULATED, FALLBACK, FEATURES, QUANTISED, cell_of
from tests.matrix.results import Matrix, cells_of, exists
from vllm_npu_prep.compat.releases import SUPPORTED_VLLM, installed_vllm
from vllm_npu_prep.startup.refusals import REFUSALS

MATRIX = Matrix.read()


def engine_line(test: str = "tests/engine/test_v2.py::test_a", **more) -> dict:
    line = {"test": test, "outcome": "passed", "commit": "c" * 10, "package": "p" * 10}
    line |= {"release": "0.32.0", "device": FALLBACK, "runner": "V1", "model": "M"}
    return line | {"features": ["LoRA"]} | more


@pytest.fixture
def all_exist(monkeypatch):
    monkeypatch.setattr(results, "exists", lambda test: "gone" not in test)


def test_the_page_says_what_the_results_say():
    assert page.PAGE.read_text() == page.render(MATRIX), "make matrix MERGE=1"


def test_a_cell_names_a_test_that_exists(request):
    """Its function; and its combination, where this run collects the file."""
    collected = {item.nodeid for item in request.config.stash[collect.COLLECTED]}
    files = {nodeid.partition("::")[0] for nodeid in collected}
    for line in MATRIX.engines:
        assert exists(line["test"]), line["test"]
        if line["test"].partition("::")[0] in files - {ROWS}:  # which are those of a device
            assert line["test"] in collected
    assert not exists("tests/engine/test_v2.py::test_that_nobody_wrote[1]")
    assert not exists("tests/engine/test_nothing.py::test_a")


def test_a_cell_is_of_a_feature_and_a_table_that_there_are():
    names = {feature.name for feature in FEATURES}
    assert len(MATRIX.filled()) > 200
    for line in MATRIX.engines:
        assert set(line["features"]) <= names and line["release"] in SUPPORTED_VLLM
        assert line["device"] in (FALLBACK, EMULATED) and line["runner"] in ("V1", "V2")
        assert len(line["commit"]) == len(line["package"]) == 10
    for table in MATRIX.tables():
        for model in MATRIX.models(table):
            ran_here = MATRIX.configs.get((model, table[1])) is not None
            told = set(MATRIX.answers.get((table, model), ()))
            # Of another release start-up is asked when that is installed
            assert told == (names if ran_here else set()) or (
                not told and table[0] != installed_vllm()
            )
    refused = {
        name
        for told in MATRIX.answers.values()
        for each in told.values()
        for name in each.get("refused", ())
    }
    assert refused <= set(REFUSALS)


def test_start_up_still_says_what_the_page_says(seed):
    """Each refusal of the page is asked for again, and some of what is accepted."""
    asked: dict[str, tuple] = {}
    accepted = []
    for (table, model), told in MATRIX.answers.items():
        for feature, each in told.items() if table[0] == installed_vllm() else ():
            for name in each.get("refused", ()):
                asked.setdefault(name, (table, model, feature, each))
            if not each:
                accepted.append((table, model, feature, each))
    assert len(asked) > 10
    for table, model, feature, told in [*asked.values(), *random.Random(seed).sample(accepted, 20)]:
        config = MATRIX.configs.get((model, table[1]))
        assert config is not None, (table, model)
        assert answer(config, feature, *table[1:]) == told, (table, model, feature)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=1)


def test_features_are_read_from_the_configuration(model):
    plain = cell_of(engine_config(model, enforce_eager=True))
    told = plain["model"], plain["device"], plain["runner"]
    assert told == ("Qwen3ForCausalLM", FALLBACK, "V1")
    assert plain["release"] == installed_vllm() and plain["config"]["model_type"] == "qwen3"
    always = {"float32", "asynchronous scheduling", "chunked prefill", "prefix caching"}
    assert set(plain["features"]) == always | {"without graphs"}
    more = engine_config(
        model,
        **graphs("FULL_AND_PIECEWISE", 4),
        enable_lora=True,
        max_lora_rank=8,
        async_scheduling=False,
        enable_prefix_caching=False,
        tensor_parallel_size=2,
        kv_offloading_size=1,
        speculative_config={"method": "ngram", "num_speculative_tokens": 2},
        dtype="bfloat16",
    )
    asked_for = {"LoRA", "ngram", "tensor parallelism", "KV offloading", "bfloat16"}
    asked_for |= {"piecewise graphs", "full graphs", "synchronous scheduling", "chunked prefill"}
    assert set(cell_of(more)["features"]) == asked_for


def test_every_feature_is_one_that_can_be_asked_for(model):
    """Its settings make an engine that has it, or are refused; none is without effect."""
    config = json.loads((model / "config.json").read_text())
    told = {each.name: answer(config, each.name, FALLBACK, "V1") for each in FEATURES}
    wrong = {name: each for name, each in told.items() if "error" in each}
    assert set(wrong) == {"MTP", "expert parallelism"}, wrong  # a dense model without MTP layers
    for feature in FEATURES:
        given = str(feature.asked)
        if (
            feature.asked
            and feature.name not in wrong
            and not (DRAFTER in given or QUANTISED in given)
        ):
            config = engine_config(model, **{"async_scheduling": False, **feature.asked})
            assert feature.has(config), feature.name


def test_newer_lines_replace_older_ones_and_few_are_kept(all_exist):
    matrix = Matrix()
    old = [
        engine_line("a", features=["LoRA", "float32"], package="o" * 10),
        engine_line("b", features=["MTP"], package="o" * 10),
        engine_line("gone", features=["sleep mode"]),
    ]
    matrix.merge(old, "p" * 10)
    assert [line["test"] for line in matrix.engines] == ["a", "b"]
    assert matrix.stale("p" * 10) == {"a", "b"}
    new = [
        engine_line("c", features=["LoRA", "float32", "sleep mode"], config={"hidden_size": 8}),
        engine_line("d", features=["LoRA"]),
        engine_line("b", features=["MTP"], outcome="failed"),
    ]
    matrix.merge(new, "p" * 10)
    outcomes = {line["test"]: line["outcome"] for line in matrix.engines}
    assert outcomes == {"c": "passed", "b": "failed"}
    assert matrix.configs == {("M", FALLBACK): {"hidden_size": 8}}
    assert matrix.stale("p" * 10) == {"b"}, "it failed"
    mended = Matrix(engines=list(matrix.engines))
    mended.merge([engine_line("b", features=["ngram"])], "p" * 10)
    outcomes = [(line["test"], line["outcome"]) for line in mended.engines]
    assert outcomes == [("c", "passed"), ("b", "passed")]
    cells = {cell: line["outcome"] for cell, line in matrix.filled().items()}
    assert [feature for _, _, feature in cells] == ["LoRA", "float32", "sleep mode", "MTP"]
    assert list(cells.values()).count("failed") == 1


def test_a_config_is_of_its_device_and_with_mtp_layers(all_exist):
    """Else start-up is asked about sizes of another device, or about MTP without its layers."""
    matrix = Matrix()
    lines = [
        engine_line("a", features=["float32"], config={"layers": 0}),
        engine_line("b", features=["MTP"], config={"layers": 1}),
        engine_line("c", features=["LoRA"], config={"layers": 2}),
    ]
    matrix.merge(lines, "p" * 10)
    assert matrix.configs == {("M", FALLBACK): {"layers": 1}}


def test_marks_and_lists_of_the_page(all_exist):
    matrix = Matrix()
    lines = [
        engine_line("a.py::test[1|2]", features=["LoRA"]),
        engine_line("b", features=["float32"], model="N"),
        engine_line("c", features=["MTP"], model="N", outcome="failed"),
    ]
    matrix.merge(lines, "p" * 10)
    table = ("0.32.0", FALLBACK, "V1")
    both = {f"{how}chronous scheduling": {"refused": ["x"]} for how in ("syn", "asyn")}
    told = {"MTP": {"refused": ["a-name", "other"]}, "ngram": {"error": "`no`"}}
    matrix.answers[table, "M"] = told
    matrix.answers[table, "N"] = {**both, "LoRA": {"refused": ["lora", "x"]}}
    matrix.tried[table, "N", "structured output"] = {"tried": "it fell over"}
    text = page.render(matrix)
    heads = ["model", *(feature.short for feature in FEATURES)]
    rows = {
        line.split("|")[1].strip(): dict(zip(heads, map(str.strip, line.split("|")[1:])))
        for line in text.splitlines()
        if line.startswith(("| `M`", "| `N`"))
    }
    first, second = rows["`M`"], rows["`N`"]
    assert (first["LoRA"], first["MTP"], first["ngram"], first["fp32"]) == ("1", "r1", "v1", "-")
    assert (second["fp32"], second["MTP"], second["LoRA"]) == ("2", "!", "r2")
    assert "1. `a.py::test[1\\|2]`, cccccccccc\n2. `b`, cccccccccc" in text
    assert "- r1: `a-name`, `other`\n- r2: `x`\n" in text and "- v1: `'no'`" in text
    assert (first["images"], first["JSON"], second["JSON"]) == (".", "-", "t1")
    assert "- t1: `it fell over`\n" in text and "reads text alone: `M`, `N`" in text
    assert "- **float32**: `M`: not reached yet; 1 other model ran" in text
    assert "- **tensor parallelism**: every model of this table: not reached yet; engines" in text
    assert "## Failed\n\n- `c`, cccccccccc" in text
    assert f"| 0.32.0 | {FALLBACK} | V1 | 2 | 2 |" in text


ONE_TEST = """
import pytest
from tests.matrix import collect

@pytest.mark.parametrize("how", ["passes", "fails", "skips"])
def test_engine(how):
    collect.add([{"model": "M", "features": ["LoRA"]}] * 2)
    assert how != "fails"
    if how == "skips":
        pytest.skip("says so")

def test_without():
    pass
"""


def test_engines_are_written_with_their_test_and_its_outcome(tmp_path):
    """By workers, too."""
    (tmp_path / "test_it.py").write_text(ONE_TEST)
    (tmp_path / "conftest.py").write_text(
        "from pathlib import Path\n"
        "from tests.matrix import collect\n"
        "collect.commit = lambda: ('c' * 10, 'p' * 10)\n"
        "def pytest_configure(config):\n"
        "    file = Path(__file__).with_name('out') / 'cells.jsonl'\n"
        "    config.pluginmanager.register(collect.Collector(file))\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "."]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [collect.ROOT]))}
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=LIMIT)
    lines = results.collected_in(tmp_path / "out" / "cells.jsonl")
    told = {(line["test"], line["outcome"]) for line in lines}
    outcomes = {"passes": "passed", "fails": "failed"}
    assert told == {(f"test_it.py::test_engine[{how}]", each) for how, each in outcomes.items()}
    assert len(lines) == 2
    assert all(line["commit"] == "c" * 10 and line["package"] == "p" * 10 for line in lines)
    assert list(cells_of({**lines[0], "release": "r", "device": "d", "runner": "V1"})) == [
        (("r", "d", "V1"), "M", "LoRA")
    ]


def test_nothing_is_written_without_a_commit(tmp_path, monkeypatch):
    class Report:
        nodeid, outcome, when = "a", "passed", "teardown"

    for known in ((), ("c" * 10, "p" * 10)):
        monkeypatch.setattr(collect, "commit", lambda known=known: known or ("", ""))
        collector = collect.Collector(tmp_path / "cells.jsonl")
        kept = collect.taken()
        collect.add([{"model": "M"}])
        collector.pytest_runtest_logreport(Report)
        collect.add(kept)
        assert (tmp_path / "cells.jsonl").exists() == bool(known)
