"""The table of an engine's calls: how it is written, resumed, read, and refused."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.engine import engine_config
from vllm_npu_prep.cli import main
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.verify import children
from vllm_npu_prep.verify.calls.table import Table, TableWriter, read_table
from vllm_npu_prep.verify.outcome import Result, RunResults, Verdict

RIGHT = Result("one-001", "npu::one", "x [3]", "4", "4", "same", 0.5, 12.0, "", 10.0)
CHILD = """
import argparse, json
from pathlib import Path
from vllm_npu_prep.verify.calls.table import read_table
parser = argparse.ArgumentParser()
for name in ("--folder", "--calls", "--done"):
    parser.add_argument(name, type=Path)
args = parser.parse_args()
done = read_table(args.done).results if args.done else ()
rows = [name for name in ("one", "two", "three") if f"key of {{name}}" not in done]
described = [dict(name=n, what=n, ranks=1, seconds=60, key=f"key of {{n}}") for n in rows]
hello = dict(device="chip", visible=1, versions={{"CANN": {cann!r}}}, engine={{"model": "m"}})
print(json.dumps(hello | dict(rows=described)), flush=True)
for name in rows:
    print(json.dumps(dict(begin=name)))
    print(json.dumps(dict(form=dict(torch_got="", torch_microseconds=5.0))), flush=True)
    if name == {dies_at!r}:
        raise SystemExit(3)
    outcome = dict(given="", expected="a", got="a", verdict="same")
    print(json.dumps(dict(end=name, outcome=outcome)), flush=True)
"""


@pytest.fixture
def table(tmp_path) -> Path:
    return tmp_path / "table.jsonl"


@pytest.fixture
def verify(table, monkeypatch, tmp_path):
    """Function that runs the command with rows that are none, and returns its exit code."""

    def verify(*options: str, cann: str = "9.1.0", dies_at: str = "") -> int:
        script = CHILD.format(cann=cann, dies_at=dies_at)
        monkeypatch.setattr(children, "CHILD", (sys.executable, "-c", script))
        calls = ("--calls", str(tmp_path / "calls.jsonl"), "--table", str(table))
        return main(["verify-device", *calls, *options])

    return verify


def written(path: Path, *results: Result, config: dict | None = None, **of: str) -> Table:
    engine = {"model": "m", "config": config or {}}
    keys = {result.name: f"key of {result.name}" for result in results}
    found = RunResults(of.get("chip", "cpu"), {"CANN": of.get("CANN", "")}, [], engine, keys)
    writer = TableWriter(path, found, {"torch_npu": of.get("torch_npu", "")}, None)
    for result in results:
        writer.add(result)
    return read_table(path)


def test_a_table_is_read_as_it_was_written(table):
    found = written(table, RIGHT, chip="Ascend910B1", CANN="9.1.0", torch_npu="2.13.0")
    assert found.results == {"key of one-001": RIGHT}
    assert found.of == {"chip": "Ascend910B1", "CANN": "9.1.0", "torch_npu": "2.13.0"}


def test_a_line_that_was_not_finished_is_left_out(table):
    written(table, RIGHT)
    with table.open("a") as file:
        file.write(json.dumps({"key": "key of two"})[:-4])
    assert [*read_table(table).results] == ["key of one-001"]


def test_calls_that_were_not_begun_are_not_in_the_table(table):
    """The device was lost before; `--resume` tries them."""
    lost = replace(RIGHT, name="two-001", verdict=Verdict.DEAD, seconds=0.0)
    assert written(table, RIGHT, lost).results == {"key of one-001": RIGHT}


def test_a_call_that_was_left_out_stays_unverified(table):
    """An engine makes and counts it as one that is in no table."""
    left_out = replace(RIGHT, name="two-001", verdict=Verdict.LEFT_OUT)
    assert written(table, RIGHT, left_out).results == {"key of one-001": RIGHT}


@pytest.mark.parametrize("text", ["", "nonsense\n", '{"format": "another"}\n', "[1]\n"])
def test_a_file_that_is_no_table_is_refused(table, text):
    table.write_text(text)
    with pytest.raises(
        PrepError, match=r"table.jsonl is no table of verified calls .*--table FILE"
    ):
        read_table(table)


def test_a_run_goes_on_where_another_ended(verify, table, capsys):
    """The row that killed its process has a verdict, too, and is not run again."""
    assert verify() == 0
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(lines[:2]) + lines[2][:20])  # what a kill may leave
    assert verify("--resume", "--json", dies_at="one") == 0  # which is not run
    assert [json.loads(line)["key"] for line in table.read_text().splitlines()[1:]] == [
        f"key of {name}" for name in ("one", "two", "three")
    ]
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["name"] for row in rows] == ["one", "two", "three"]


def test_a_run_of_other_software_is_not_gone_on_with(verify, capsys):
    assert verify() == 0
    assert verify("--resume", cann="9.2.0") == 2
    assert "is of another engine, or was made with other versions" in capsys.readouterr().err


def test_a_dead_row_keeps_what_torchs_form_gave(verify, table):
    """So that an engine can take that form."""
    assert verify(dies_at="two") == 1
    found = read_table(table).results["key of two"]
    assert (found.verdict, found.torch_got) == ("DEAD", "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--table", "t"], "give --model or --calls"),
        (["--calls", "c", "--resume"], "--table FILE, which is not given"),
        (["--calls", "c", "--table", "none/t"], "there is no folder none"),
    ],
)
def test_options_that_go_together_are_named(options, said, capsys):
    assert main(["verify-device", *options]) == 2
    assert said in capsys.readouterr().err


def bad(torch_got: str | None) -> Result:
    return Result("w-1", "npu::w", "x [3]", "1 at row 2", "0", "DIFFERS", 0.1, None, torch_got)


@pytest.mark.parametrize(
    ("torch_got", "said"),
    [
        (None, r"npu::w \(w-1: x \[3\]\): expected 1 at row 2, got 0; torch has no form .*\"verif"),
        ("no answer", "torch's own form gave no answer"),
    ],
)
def test_a_wrong_call_that_nothing_replaces_is_refused(table, torch_got, said):
    with pytest.raises(PrepError, match=said):
        written(table, bad(torch_got)).refuse_what_cannot_be_replaced()
    written(table, bad("")).refuse_what_cannot_be_replaced()


def test_a_table_of_another_device_or_model_is_refused(table, demo_model):
    """Each by its name, before an engine starts."""
    config = json.loads((demo_model / "config.json").read_text())

    def start(path: Path = table) -> None:
        options = {"npu_prep": {"verified": str(path)}}
        engine_config(demo_model, additional_config=options)

    written(table, RIGHT, config=config)
    start()
    for of, said in (
        ({"chip": "Ascend910B1"}, "made with chip Ascend910B1, and this engine has cpu"),
        ({"CANN": "8.5.0"}, "made with CANN 8.5.0, and this engine has none"),
        ({"config": {**config, "hidden_size": 1}}, "config.json differs .* in hidden_size;"),
    ):
        written(table, RIGHT, **{"config": config, **of})
        with pytest.raises(PrepError, match=said):
            start()
    with pytest.raises(PrepError, match="is no table of verified calls"):
        start(demo_model / "config.json")


def test_a_table_serves_models_with_other_numbers_of_layers(table):
    """Lists that come with the package are of few layers; no calls depend on tokens' names."""
    config = {"architectures": ["A"], "hidden_size": 64, "num_hidden_layers": 2, "eos_token_id": 1}
    found = written(table, RIGHT, config={**config, "parts": {"num_heads": 4}})
    found.refuse_other_model({**config, "num_hidden_layers": 48, "eos_token_id": 7, "new_size": 1})
    for other in ({"architectures": ["B"]}, {"hidden_size": 32}, {"parts": {"num_heads": 5}}):
        with pytest.raises(PrepError, match=r"whose config\.json differs"):
            found.refuse_other_model({**config, **other})
